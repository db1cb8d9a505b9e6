"""One namespace's entries, arena and budget, and what can be done to them.

Owns Space: it opens the arena when the first capture needs it, seeds, launches and gives back whole
generations. Does not decide when: that is GraphCache's policy.
"""

import time
from typing import Final

from graphseed.capture.budget import Budget
from graphseed.capture.driver import Arena, Definition, Driver, Executable, Work
from graphseed.capture.entry import Entry, State
from graphseed.capture.errors import CannotCapture, DeviceLost, LaunchFailed, Reason
from graphseed.capture.events import Cause, EventLog, Refused, Released, Replayed, Seeded
from graphseed.capture.identity import GraphIdentity, Namespace

REMEMBERED: Final = 1024  # entries kept for their counters and reasons; held ones are always kept
BACK_OFF: Final = 8  # observations until the first retry of a transient refusal; doubles each time
BACK_OFF_LIMIT: Final = 4096
_FORGOTTEN_FIRST: Final = frozenset({State.UNSEEN, State.RELEASED})
_FORGOTTEN_LAST: Final = frozenset({State.REFUSED})  # it would be tried again


class Space:
    """One namespace of a cache. Created, used and closed by its GraphCache; one thread."""

    def __init__(self, driver: Driver, namespace: Namespace, budget: Budget, log: EventLog) -> None:
        self.namespace = namespace
        self.budget = budget
        self.entries: dict[GraphIdentity, Entry] = {}
        self.num_held = 0  # executables
        self.num_bytes = 0  # that those hold
        self._driver = driver
        self._log = log
        self._arena: Arena | None = None

    @property
    def is_open(self) -> bool:
        """Whether an arena holds memory of this namespace."""
        return self._arena is not None

    def entry(self, identity: GraphIdentity) -> Entry:
        """The entry of an identity, made UNSEEN when it is new, with the observation counted."""
        entry = self.entries.get(identity)
        if entry is None:
            if len(self.entries) >= REMEMBERED:
                self._forget_one()
            entry = self.entries[identity] = Entry(identity)
        entry.num_observations += 1
        return entry

    def seed(self, entry: Entry, work: Work, to: State) -> bool:
        """Capture and instantiate `work` for an entry and move it to `to`; launch nothing.

        False when the driver refuses: the entry is then REFUSED, with the reason and an event.
        """
        if self.budget.is_full(self.num_held, self.num_bytes):
            pending = entry.pending
            self.release_generation(Cause.BUDGET)
            if entry.state is State.RELEASED:  # it was OBSERVED, in the generation just released
                entry.move(State.UNSEEN)
                entry.move(State.OBSERVED)
                entry.pending = pending
        try:
            executable, root, times_ns = self._make(entry, work)
        except CannotCapture as refusal:
            self.refuse(entry, refusal.reason, refusal.detail)
            return False
        except DeviceLost:
            raise
        except Exception as error:  # a driver's fault is no reason to lose the answer (I8)
            self.refuse(entry, Reason.DRIVER_RAISED, f"{type(error).__name__}: {error}")
            return False
        entry.move(to)
        entry.executable, entry.root, entry.pending = executable, root, None
        entry.num_attempts, entry.retry_at, entry.reason = 0, None, None
        entry.capture_ns, entry.instantiate_ns = times_ns
        entry.num_seeds += 1
        self.num_held += 1
        self.num_bytes += executable.num_bytes
        self._log.emit(
            Seeded(
                device=self._driver.device, namespace=self.namespace, identity=entry.identity,
                num_nodes=executable.num_nodes, num_bytes=executable.num_bytes,
                capture_ns=entry.capture_ns, instantiate_ns=entry.instantiate_ns,
                root=root, num_seeds=entry.num_seeds,
            )
        )  # fmt: skip
        return True

    def _make(self, entry: Entry, work: Work) -> tuple[Executable, str, tuple[int, int]]:
        """Executable, root, and the nanoseconds of capture and instantiate."""
        if self._arena is None:
            self._arena = self._driver.open(self.namespace)
        start_ns = time.perf_counter_ns()
        definition = self._arena.capture(work)
        captured_ns = time.perf_counter_ns()
        try:
            self._check_first_node(entry, definition)
            executable = self._arena.instantiate(definition)
        except BaseException:
            self._arena.discard(definition)
            raise
        done_ns = time.perf_counter_ns()
        return executable, definition.root, (captured_ns - start_ns, done_ns - captured_ns)

    def launch(self, entry: Entry) -> object:
        """Replay a PROVEN entry and return its result. Raises LaunchFailed, DeviceLost."""
        if entry.executable is None or self._arena is None:
            raise LaunchFailed(f"entry [{entry.identity}] holds no executable")
        self._arena.launch(entry.executable)
        entry.num_replays += 1
        self._log.emit(
            Replayed(
                device=self._driver.device, namespace=self.namespace, identity=entry.identity,
                num_replays=entry.num_replays,
            )
        )  # fmt: skip
        return entry.executable.result

    def refuse(self, entry: Entry, reason: Reason, detail: str) -> None:
        """Move an entry to REFUSED; a transient reason is tried again after a growing pause."""
        retry_at = None
        if reason.is_transient:
            pause = min(BACK_OFF << entry.num_attempts, BACK_OFF_LIMIT)
            retry_at = entry.num_observations + pause
            entry.num_attempts += 1
        if entry.state is not State.REFUSED:
            entry.move(State.REFUSED)
        entry.reason, entry.retry_at = reason, retry_at
        self._log.emit(
            Refused(
                device=self._driver.device, namespace=self.namespace, identity=entry.identity,
                reason=reason, detail=detail, retry_at=retry_at,
            )
        )  # fmt: skip

    def release_one(self, entry: Entry, to: State, cause: Cause) -> None:
        """Destroy one entry's executable and move it; the arena keeps its memory."""
        start_ns = time.perf_counter_ns()
        num_bytes = entry.executable.num_bytes if entry.executable is not None else 0
        if entry.executable is not None and self._arena is not None:
            self._arena.release(entry.executable)
            self.num_held -= 1
            self.num_bytes -= num_bytes
        entry.move(to)
        self._emit_released(cause, 1, num_bytes, 0, start_ns, is_generation=False)

    def release_generation(self, cause: Cause) -> None:
        """Give back everything held, as one, after what is in flight is done (I5)."""
        start_ns = time.perf_counter_ns()
        held = [entry for entry in self.entries.values() if entry.is_held]
        num_executables, num_bytes = self.num_held, self.num_bytes
        for entry in held:
            entry.move(State.RELEASED)  # drops our references first: the pool must be unused
        self.num_held = self.num_bytes = 0
        arena, self._arena = self._arena, None
        num_returned = arena.close() if arena is not None else 0
        if held or arena is not None:
            self._emit_released(cause, num_executables, num_bytes, num_returned, start_ns)

    def reset_refusals(self) -> None:
        """A new generation of bindings: what was refused or quarantined is unseen again."""
        for entry in self.entries.values():
            if entry.state in (State.REFUSED, State.QUARANTINED):
                entry.move(State.UNSEEN)
                entry.num_attempts, entry.retry_at, entry.reason = 0, None, None

    def _check_first_node(self, entry: Entry, definition: Definition) -> None:
        declared, recorded = entry.identity.first_node, definition.first_node
        if recorded is not None and recorded != declared:
            raise CannotCapture(
                Reason.FIRST_NODE_DIFFERED, f"declared {declared}, recorded {recorded}"
            )
        if entry.root is not None and entry.root != definition.root:
            raise CannotCapture(
                Reason.FIRST_NODE_DIFFERED,
                f"the root was {entry.root} at the first seed and is now {definition.root}",
            )

    def _emit_released(
        self, cause: Cause, num_entries: int, num_bytes: int, num_returned: int, start_ns: int,
        is_generation: bool = True,
    ) -> None:  # fmt: skip
        self._log.emit(
            Released(
                device=self._driver.device, namespace=self.namespace, cause=cause,
                num_entries=num_entries, bytes_held=num_bytes, bytes_returned=num_returned,
                elapsed_ns=time.perf_counter_ns() - start_ns, is_generation=is_generation,
            )
        )  # fmt: skip

    def _forget_one(self) -> None:
        """Forget the oldest entry that loses the least; never one held or quarantined."""
        for states in (_FORGOTTEN_FIRST, _FORGOTTEN_LAST):
            for identity, entry in self.entries.items():
                if entry.state in states:
                    del self.entries[identity]
                    return
