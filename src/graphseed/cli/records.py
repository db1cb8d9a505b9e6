"""The files that commands write results to.

Owns the check before anything is loaded, and appending one JSON line. Does not know what is in it.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)


def check_writable(flag: str, path: Path | None) -> None:
    """Raise BadParameter where a file that was asked for cannot be written. Makes its folder."""
    from graphseed.engine import BadParameter

    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise BadParameter(flag, str(path), f"a file to write ({error})") from None


def append_record(path: Path, record: Mapping[str, object]) -> None:
    """Append one result as a JSON line, and say so."""
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")
    logger.info("result appended to %s", path)
