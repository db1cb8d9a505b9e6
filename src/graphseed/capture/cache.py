"""GraphCache: the policy, on one screen.

Owns the two namespaces of one device and decides, at each observation, whether to run direct, to
seed, or to replay. Every branch ends in a correct answer. Does not know how a device captures (the
driver does), nor what a step computes.
"""

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from graphseed.capture.budget import Budget
from graphseed.capture.driver import Driver
from graphseed.capture.entry import Entry, State
from graphseed.capture.errors import Closed, LaunchFailed, Reason, WrongThread
from graphseed.capture.events import Cause, Deferred, Direct, EventLog, Stale, Why
from graphseed.capture.identity import Bindings, GraphIdentity, Namespace
from graphseed.capture.selector import Policy, Selection
from graphseed.capture.space import Space

R = TypeVar("R")


class GraphCache:
    """Runs steps by identity: direct, seeded or replayed.

    Owned and closed by the engine; every method belongs to the thread that first called `run`.
    Does not own the driver.
    """

    def __init__(
        self,
        driver: Driver,
        selection: Selection | None = None,
        *,
        budgets: Mapping[Namespace, Budget] | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.log = log or EventLog()
        self.selection = selection or Selection()
        self._driver = driver
        self._policies = {
            Namespace.PROMPT: self.selection.prompt,
            Namespace.DECODE: self.selection.decode,
        }
        budgets = budgets or {}
        self.spaces = {
            namespace: Space(driver, namespace, budgets.get(namespace, Budget()), self.log)
            for namespace in Namespace
        }
        self._bindings = Bindings()
        self.num_unfinished_prompts = 0  # admitted ones; they hold back the release of seed (I5)
        self._is_deferring = False
        self._thread: int | None = None
        self._is_closed = False

    def run(self, identity: GraphIdentity, work: Callable[[], R]) -> R:
        """Answer one observation of `identity`, by replay where that is proven, else by `work`.

        `work` must be host-pure (I11). The result of a replay is the recording's own result object,
        valid until the next run in the namespace. Whatever `work` raises on the direct path is
        raised here, and the identity is then unseen again (I3).
        """
        self._check_usable()
        space = self.spaces[identity.namespace]
        entry = space.entry(identity)
        if not self._is_release_due(identity):
            return self._answer(space, entry, work)
        prompts = self.spaces[Namespace.PROMPT]
        if entry.is_held:  # launch first: giving back then hides behind the step on the device
            result = self._answer(space, entry, work)
            prompts.release_generation(Cause.DECODE)
            return result
        prompts.release_generation(Cause.DECODE)  # first: the capture may need the memory
        return self._answer(space, entry, work)

    def _answer(self, space: Space, entry: Entry, work: Callable[[], R]) -> R:
        if entry.state is State.RELEASED or self._is_back_off_over(entry):
            entry.move(State.UNSEEN)
        match entry.state:
            case State.PROVEN | State.TRUSTED:
                return self._replay(space, entry, work)
            case State.SEEDED:
                if entry.direct_done is not None:
                    entry.direct_done.wait()
                entry.direct_done = None
                entry.move(State.PROVEN)
                return self._replay(space, entry, work)
            case State.UNSEEN:
                return self._first(space, entry, work)
            case State.OBSERVED:
                return self._direct(entry, work, Why.OBSERVING)
            case State.QUARANTINED:
                return self._direct(entry, work, Why.QUARANTINED)
            case _:
                return self._direct(entry, work, Why.REFUSED)

    def settle(self, max_captures: int | None = None) -> int:
        """Capture what policy `resident` observed and whose direct run has completed.

        Call it once the next work is submitted, or when idle. Tries `max_captures` at most and
        returns how many it tried, refused ones included; it never waits for the device.
        """
        self._check_usable()
        if Policy.RESIDENT not in self._policies.values():
            return 0  # nothing ever waits; engines call this at each step
        num_tried = 0
        for space in self.spaces.values():
            waiting = [e for e in space.entries.values() if e.state is State.OBSERVED]
            for entry in waiting:
                if max_captures is not None and num_tried >= max_captures:
                    return num_tried
                work, done = entry.pending, entry.direct_done
                if work is None or (done is not None and not done.is_done()):
                    continue
                entry.direct_done = None
                space.seed(entry, work, State.PROVEN)
                num_tried += 1
        return num_tried

    def release(self, namespace: Namespace, cause: Cause = Cause.REQUESTED) -> None:
        """Give back one namespace's whole generation, after what is in flight is done."""
        self._check_usable()
        self.spaces[namespace].release_generation(cause)

    def rebind(self, bindings: Bindings) -> tuple[str, ...]:
        """Say what recordings from now on will bake in; a change makes every earlier one stale.

        Returns the names that changed. Call it before memory a recording reads is let go (I7).
        Before the first run it may be called on any thread.
        """
        self._check_usable(is_claiming=False)
        changed = self._bindings.stale(bindings)
        self._bindings = bindings
        if changed:
            for space in self.spaces.values():
                if space.num_held:
                    self.log.emit(
                        Stale(
                            device=self._driver.device, namespace=space.namespace,
                            num_entries=space.num_held, names=changed,
                        )
                    )  # fmt: skip
                space.release_generation(Cause.STALE)
                space.reset_refusals()
        return changed

    def close(self) -> None:
        """Release everything. May be called twice; `run` raises Closed afterwards."""
        if self._is_closed:
            return
        self._check_usable(is_claiming=False)
        for space in self.spaces.values():
            space.release_generation(Cause.SHUTDOWN)
        self._is_closed = True

    def _first(self, space: Space, entry: Entry, work: Callable[[], R]) -> R:
        match self._policies[space.namespace]:
            case Policy.OFF:
                return self._direct(entry, work, Why.POLICY_OFF)
            case Policy.SEED:
                return self._seed(space, entry, work)
            case Policy.RESIDENT:
                result = self._direct(entry, work, Why.OBSERVING)
                entry.move(State.OBSERVED)
                entry.direct_done, entry.pending = self._driver.mark(), work
                return result

    def _seed(self, space: Space, entry: Entry, work: Callable[[], R]) -> R:
        if not space.seed(entry, work, State.SEEDED):
            return self._direct(entry, work, Why.REFUSED)
        try:
            result = self._direct(entry, work, Why.SEEDING)
            entry.direct_done = self._driver.mark()
        except BaseException:
            space.release_one(entry, State.UNSEEN, Cause.DIRECT_RAISED)
            raise
        return result

    def _replay(self, space: Space, entry: Entry, work: Callable[[], R]) -> R:
        try:
            return cast(R, space.launch(entry))
        except LaunchFailed as failure:
            space.release_one(entry, State.REFUSED, Cause.LAUNCH_FAILED)
            space.refuse(entry, Reason.LAUNCH_FAILED, str(failure))
            return self._direct(entry, work, Why.LAUNCH_FAILED)

    def _direct(self, entry: Entry, work: Callable[[], R], why: Why) -> R:
        result = work()
        identity = entry.identity
        self.log.emit(
            Direct(
                device=self._driver.device, namespace=identity.namespace, identity=identity, why=why
            )
        )
        return result

    def _is_release_due(self, identity: GraphIdentity) -> bool:
        """Whether this is the decode graph that ends the prompt generation of `seed` (I5)."""
        if identity.namespace is not Namespace.DECODE or self.selection.prompt is not Policy.SEED:
            return False
        if not self.spaces[Namespace.PROMPT].is_open or identity.get("batch") != 1:
            return False
        if self.num_unfinished_prompts == 0:
            self._is_deferring = False
            return True
        if not self._is_deferring:
            self._is_deferring = True  # counted once for each release that waits
            self.log.emit(
                Deferred(
                    device=self._driver.device, namespace=Namespace.PROMPT,
                    num_unfinished=self.num_unfinished_prompts,
                )
            )  # fmt: skip
        return False

    def _is_back_off_over(self, entry: Entry) -> bool:
        return (
            entry.state is State.REFUSED
            and entry.retry_at is not None
            and entry.num_observations >= entry.retry_at
        )

    def _check_usable(self, is_claiming: bool = True) -> None:
        if self._is_closed:
            raise Closed("the graph cache is closed")
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread if is_claiming else None
        elif self._thread != thread:
            raise WrongThread(
                "graphs are captured, launched and destroyed by one thread: the one that first "
                "used this cache"
            )
