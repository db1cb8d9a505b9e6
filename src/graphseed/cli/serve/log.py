"""How `graphseed serve` logs: llama-server's look, on standard error and in a file.

Owns the format and the file. Levels are main's.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from graphseed.cli.serve.flags import BadUsage, ServeArgs

_NAMES: Final = {"graphseed.server": "srv", "graphseed.server.http": "srv"}


class ElapsedFormatter(logging.Formatter):
    """`0.01.361.988 I srv  listening on ...`: minutes, seconds, milliseconds, microseconds."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        total_us = int(record.relativeCreated * 1e3)
        seconds, us = divmod(total_us, 1_000_000)
        name = _NAMES.get(record.name, record.name.removeprefix("graphseed."))
        return (
            f"{seconds // 60}.{seconds % 60:02d}.{us // 1000:03d}.{us % 1000:03d} "
            f"{record.levelname:.1} {name:<4} {record.message}"
        )


@contextmanager
def configured(args: ServeArgs) -> Iterator[None]:
    """Log so while it lasts. Raises BadUsage for a file that cannot be written."""
    root = logging.getLogger()
    before = [(handler, handler.formatter) for handler in root.handlers]
    was_disabled = logging.root.manager.disable
    added: logging.FileHandler | None = None
    if args.log_file:
        try:
            added = logging.FileHandler(args.log_file, encoding="utf-8")
        except OSError as error:
            raise BadUsage(f"--log-file {args.log_file} cannot be written: {error}") from None
        root.addHandler(added)
    for handler in root.handlers:
        handler.setFormatter(ElapsedFormatter())
    if args.logs_nothing:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(was_disabled)
        for handler, formatter in before:
            handler.setFormatter(formatter)
        if added is not None:
            root.removeHandler(added)
            added.close()
