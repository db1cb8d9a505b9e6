"""Who asked for what: the engine's requests as HTTP sees them.

Owns Ledger (the requests that were handed in, and the last one of each slot), WatchedEngine, which
tells it, and the record of one HTTP request, from which its log line is made. Does not know any
endpoint: whatever goes through the engine is seen.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from graphseed.engine import AsyncHandle, Engine, EngineCore, Handle, Request, Status

_ENDED: Final = frozenset({Status.FINISHED, Status.FAILED})
_MIN_KEPT: Final = 64  # tasks that are kept without asking which are needed


@dataclass(slots=True, eq=False)
class Task:
    """One request of the engine."""

    number: int
    request: Request
    is_read: bool | None = None  # whether its reader is there; None: nobody says

    @property
    def is_open(self) -> bool:
        """Whether somebody waits for it; an answer may be finished before it is read."""
        if self.is_read is None:
            return self.request.status not in _ENDED
        return self.is_read


@dataclass(slots=True, eq=False)
class HttpRecord:
    """One HTTP request."""

    method: str
    path: str
    number: str = field(default_factory=lambda: os.urandom(8).hex())  # the id on its log line
    started_ns: int = field(default_factory=time.perf_counter_ns)
    status: int = 0  # 0: no answer was begun
    needs_model: bool = False  # the server does not sleep while it runs
    tasks: list[Task] = field(default_factory=list)


# The HTTP request that the present task works for; asyncio copies it into tasks that are started.
CURRENT: Final[ContextVar[HttpRecord | None]] = ContextVar("graphseed_http_record", default=None)


class Ledger:
    """The requests an engine was given. One for each server; outlives engines that sleep.

    Used on the event loop's thread.
    """

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self._num_entered = 0
        self._prune_at = _MIN_KEPT
        self._on_left: list[Callable[[Request], None]] = []

    def on_left(self, call: Callable[[Request], None]) -> None:
        """Call with each request whose reader has gone: it ended, or was given up."""
        self._on_left.append(call)

    @property
    def num_open(self) -> int:
        """Requests that somebody waits for."""
        return sum(task.is_open for task in self._tasks)

    def enter(self, request: Request) -> Task:
        """Take a request in, for its HTTP request too."""
        task = Task(self._num_entered, request)
        self._num_entered += 1
        self._tasks.append(task)
        record = CURRENT.get()
        if record is not None:
            record.tasks.append(task)
        if len(self._tasks) > self._prune_at:
            self._prune()
        return task

    def leave(self, task: Task) -> None:
        """Say that a request's reader has gone; once for each."""
        task.is_read = False
        for call in self._on_left:
            call(task.request)

    def last_of_slot(self, slot: int) -> Task | None:
        """The request that had a slot last, running or not."""
        return next((task for task in self._newest() if task.request.slot == slot), None)

    def forget(self, slot: int) -> int:
        """Forget what a slot answered; returns the tokens of prompt and answer that were known."""
        last = self.last_of_slot(slot)
        self._tasks = [task for task in self._tasks if task.is_open or task.request.slot != slot]
        return 0 if last is None or last.is_open else last.request.num_tokens

    def clear(self) -> None:
        """Forget everything that has ended: the engine is another one now."""
        self._tasks = [task for task in self._tasks if task.is_open]

    def _newest(self) -> Iterator[Task]:
        return reversed(self._tasks)

    def _prune(self) -> None:
        """Keep what is open, and the last of each slot."""
        kept, slots = [], set()
        for task in self._newest():
            slot = task.request.slot
            if task.is_open or (slot is not None and slot not in slots):
                kept.append(task)
            if slot is not None:
                slots.add(slot)
        self._tasks = kept[::-1]
        self._prune_at = 2 * len(kept) + _MIN_KEPT


class WatchedEngine(Engine):
    """An engine that tells a ledger which requests it was given."""

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._ledger = ledger
        super().__init__(core)

    def start(self, request: Request, *, kv_digest: bool = False) -> Handle:
        handle = super().start(request, kv_digest=kv_digest)
        self._ledger.enter(request)
        return handle

    def aread(self, request: Request) -> AsyncHandle:
        task = self._ledger.enter(request)
        task.is_read = True
        try:
            handle = super().aread(request)
        except BaseException:
            self._ledger.leave(task)
            raise
        handle.on_closed(partial(self._ledger.leave, task))
        return handle
