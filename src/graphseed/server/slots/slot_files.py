"""Slots kept in files: save, restore and erase, as llama-server's users know them.

Owns SlotFiles: which tokens a slot knows, which names a file may have, and how a file comes to be
whole. What is in one is the engine's (`engine.saved`); what a route looks like is `slots`'s.

K/V belongs to tokens here and not to slots: what is restored into one slot is found by the prompts
of all, and what is erased of one by none.
"""

import asyncio
import logging
import os
import stat
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from graphseed.capture.errors import GraphseedError
from graphseed.engine import Engine, EngineBusy
from graphseed.engine.blocks import OutOfBlocks
from graphseed.engine.saved import BadSave, read_file, write_file
from graphseed.engine.transfer import forget_prefix, put_prefix, take_prefix
from graphseed.server.errors import Failed, InvalidRequest, NotSupported, Unavailable
from graphseed.server.ledger import Ledger
from graphseed.server.state import ServerState

R = TypeVar("R")

logger = logging.getLogger("graphseed.server")

MAX_NAME_BYTES: Final = 255
# What some file system forbids or takes for a separator, and what Unicode has in its likeness.
_FORBIDDEN: Final = frozenset('/\\:*?"<>|\x7f\uff0e\u2215\u2216\ufffd\ufeff')


class SlotFiles:
    """The actions on slots of one server. Used on the event loop's thread."""

    def __init__(self, state: ServerState, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger
        self._lock = asyncio.Lock()  # one action at a time: each may take much host memory
        # Of each slot: tokens that were restored, and the slot's last request then.
        self._restored: dict[int, tuple[tuple[int, ...], int | None]] = {}

    async def save(self, slot: int, filename: str) -> dict[str, Any]:
        """Write what a slot knows to a file. Raises ApiError and GraphseedError."""
        path = self._path(filename)
        engine = self._engine()
        async with self._lock:
            start = time.perf_counter()
            tokens = self._tokens(slot)
            num_saved, num_bytes = await _in_thread(partial(_save, engine, slot, tokens, path))
        return {
            "id_slot": slot,
            "filename": filename,
            "n_saved": num_saved,
            "n_written": num_bytes,
            "timings": {"save_ms": 1e3 * (time.perf_counter() - start)},
        }

    async def restore(self, slot: int, filename: str) -> dict[str, Any]:
        """Let a slot know what a file has. Raises ApiError and GraphseedError."""
        path = self._path(filename)
        engine = self._engine()
        async with self._lock:
            start = time.perf_counter()
            tokens, num_bytes = await _in_thread(partial(_restore, engine, slot, path))
            self._restored[slot] = tokens, self._last_task(slot)
        return {
            "id_slot": slot,
            "filename": filename,
            "n_restored": len(tokens),
            "n_read": num_bytes,
            "timings": {"restore_ms": 1e3 * (time.perf_counter() - start)},
        }

    async def erase(self, slot: int) -> dict[str, Any]:
        """Forget what a slot knows. Raises ApiError and GraphseedError."""
        engine = self._state.ready.engine
        async with self._lock:
            tokens = self._tokens(slot)
            await _in_thread(partial(_erase, engine, slot, tokens))
            self._ledger.forget(slot)
            self._restored.pop(slot, None)
        return {"id_slot": slot, "n_erased": len(tokens)}

    def _engine(self) -> Engine:
        engine = self._state.ready.engine
        if not engine.core.config.reuses_prefixes:
            raise NotSupported(
                "This server keeps no K/V of slots that ended. Start it with --cache-prompt"
            )
        return engine

    def _path(self, filename: str) -> Path:
        folder = self._state.settings.slot_save_path
        if folder is None:
            raise NotSupported(
                "This server does not support slots action. Start it with --slot-save-path"
            )
        if not is_file_name(filename):
            raise InvalidRequest("Invalid filename")
        return folder / filename

    def _tokens(self, slot: int) -> tuple[int, ...]:
        """What a slot was last given: by a request, or by a file since."""
        tokens, then = self._restored.get(slot, ((), -1))
        if then == self._last_task(slot):
            return tokens
        last = self._ledger.last_of_slot(slot)
        return () if last is None else (*last.request.prompt_ids, *last.request.output_ids)

    def _last_task(self, slot: int) -> int | None:
        last = self._ledger.last_of_slot(slot)
        return None if last is None else last.number


def is_file_name(name: str) -> bool:
    """Whether a name is a file's in its folder on every system, and nothing else.

    The rule is llama-server's.
    """
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    is_control = any(c <= "\x1f" or "\x80" <= c <= "\x9f" for c in name)
    is_stripped = name != name.strip(" ") or name.endswith(".")
    return (
        0 < num_bytes <= MAX_NAME_BYTES
        and not is_control
        and not is_stripped
        and ".." not in name
        and _FORBIDDEN.isdisjoint(name)
    )


def _save(engine: Engine, slot: int, tokens: tuple[int, ...], path: Path) -> tuple[int, int]:
    """The tokens and bytes that were written."""
    engine.call(partial(_require_idle, engine, slot))
    saved = take_prefix(engine, tokens)
    draft = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        num_bytes = write_file(saved, draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(path)
    except IsADirectoryError:
        raise InvalidRequest("Unable to save slot: it is no regular file") from None
    except OSError as error:
        raise _of_disk("Unable to save slot", error) from error
    finally:
        draft.unlink(missing_ok=True)
    return len(saved.token_ids), num_bytes


def _restore(engine: Engine, slot: int, path: Path) -> tuple[tuple[int, ...], int]:
    """The tokens that prompts find now, and the bytes that were read."""
    engine.call(partial(_require_idle, engine, slot))
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):  # nor a link, which may lead out of the folder
            raise InvalidRequest("Unable to restore slot: it is no regular file")
        saved = read_file(path)
        num_tokens = put_prefix(engine, saved)
    except FileNotFoundError:
        raise InvalidRequest("Unable to restore slot: there is no such file") from None
    except OSError as error:
        raise _of_disk("Unable to restore slot", error) from error
    except BadSave as error:
        raise InvalidRequest(f"Unable to restore slot: {error}") from None
    except (OutOfBlocks, EngineBusy) as error:
        told = f"Unable to restore slot now: {error}"
        raise Unavailable(told, retry_after_seconds=1) from None
    return saved.token_ids[:num_tokens], found.st_size


def _erase(engine: Engine, slot: int, tokens: tuple[int, ...]) -> None:
    engine.call(partial(_require_idle, engine, slot))
    forget_prefix(engine, tokens)


def _of_disk(what: str, error: OSError) -> Failed:
    """The client learns what went wrong, and the log where."""
    logger.error("%s: %s", what, error)
    return Failed(f"{what}: {error.strerror or 'the server has the details in its log'}")


def _require_idle(engine: Engine, slot: int) -> None:
    if any(sequence.slot == slot for sequence in engine.core.scheduler.sequences):
        raise Unavailable(f"slot {slot} is answering a request", retry_after_seconds=1)


async def _in_thread(function: Callable[[], R]) -> R:
    """Run beside the event loop, which waits for neither the disk nor the engine."""
    try:
        return await asyncio.to_thread(function)
    except GraphseedError:
        raise
    except RuntimeError as error:
        if not str(error).startswith("cannot schedule new futures"):
            raise
        raise Unavailable("the server is shutting down") from error  # as is the process
