"""What prompt graphs did, kept for whoever asks: a row for each identity and a bounded timeline.

Owns GraphWatch. It listens on the engine's thread, through the event log and as an observer of
steps, and is read on any; it changes nothing and keeps no engine alive. Does not know how any of it
is shown.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from graphseed.capture.budget import Budget
from graphseed.capture.cache import GraphCache
from graphseed.capture.entry import State
from graphseed.capture.errors import Reason
from graphseed.capture.events import Alarm, Direct, Event, Refused, Released, Replayed, Seeded, Why
from graphseed.capture.identity import GraphIdentity, Namespace
from graphseed.capture.selector import Policy
from graphseed.capture.tally import Tally
from graphseed.engine.plan import StepPlan
from graphseed.engine.step import StepObserver
from graphseed.server.state import Served
from graphseed.server.watch.graph_values import Kind, Observation, RaisedAlarm, Row, Seen

MAX_OBSERVATIONS: Final = 2000
MAX_ROWS: Final = 2048  # as many as both namespaces of a cache remember
MAX_ALARMS: Final = 100
RUN_SECONDS: Final = 0.25  # decode observations so close together, and alike, are told as one


class GraphWatch:
    """What is known of one server's graphs. Outlives engines that sleep; safe on any thread."""

    def __init__(self, max_observations: int = MAX_OBSERVATIONS) -> None:
        self.tally: Tally | None = None  # of the engine that is there, or was last
        self.budgets: dict[Namespace, Budget] = {}
        self._lock = threading.Lock()  # held for microseconds: the engine's thread waits for it
        self._epoch = 0
        self._seq = 0
        self._observations: deque[Observation] = deque(maxlen=max_observations)
        self._run: Observation | None = None  # of decode, still growing
        self._rows: dict[GraphIdentity, Row] = {}
        self._num_identities = 0
        self._alarms: deque[RaisedAlarm] = deque(maxlen=MAX_ALARMS)
        self._tokens = dict.fromkeys(Namespace, 0)
        self._released: dict[Namespace, Released] = {}
        self._listeners: list[Callable[[Observation], None]] = []

    def on_observed(self, call: Callable[[Observation], None]) -> None:
        """Call with each observation, on the engine's thread: it must neither raise nor wait."""
        self._listeners.append(call)

    def attach(self, served: Served) -> None:
        """Watch a model's engine from its first request on. The rows of an earlier one are gone."""
        core = served.engine.core
        if isinstance(core.observer, _Probe) and core.observer.watch is self:
            return
        probe = _Probe(self, core.cache, core.observer)
        with self._lock:
            self.tally = core.tally
            self.budgets = {name: space.budget for name, space in core.cache.spaces.items()}
            self._epoch += 1
            self._rows.clear()
            self._alarms.clear()
        core.log.subscribe(probe.take)
        core.observer = probe

    def seen(self, after: int = 0) -> Seen:
        """Everything that changed after `after`, a `seq` of an earlier call; 0: all there is."""
        with self._lock:
            self._end_run()
            fresh = []
            for observation in reversed(self._observations):
                if observation.seq <= after:
                    break
                fresh.append(observation)
            is_full = len(self._observations) == self._observations.maxlen
            first = self._observations[0].seq if self._observations else 0
            return Seen(
                epoch=self._epoch,
                seq=self._seq,
                num_missed=max(0, first - after - 1) if is_full else 0,
                observations=tuple(reversed(fresh)),
                rows=tuple(_copied(row) for row in self._rows.values() if row.seq > after),
                alarms=tuple(self._alarms),
                tokens=dict(self._tokens),
            )

    def last_released(self, namespace: Namespace) -> Released | None:
        """What was last given back in a namespace."""
        return self._released.get(namespace)

    def observed(
        self, observation: Observation, identity: GraphIdentity, change: Callable[[Row], None]
    ) -> None:
        """Take in what happened, and how it changes its identity's row. Engine thread."""
        for call in self._listeners:
            call(observation)
        with self._lock:
            self._tokens[observation.namespace] += observation.tokens
            self._append(observation)
            self._change(identity, change)

    def released(self, event: Released, state_of: Callable[[GraphIdentity], State | None]) -> None:
        """Take in a release, and where it left every identity. Engine thread."""
        with self._lock:
            self._released[event.namespace] = event
            why = f"{event.cause.value} ({event.num_entries} held)"
            now = time.time()
            self._append(Observation(now, event.namespace, Kind.RELEASED, why=why))
            for identity, row in self._rows.items():
                state = state_of(identity) if identity.namespace is event.namespace else None
                if state is None or state is row.state:
                    continue
                row.seq, row.state, row.num_bytes = self._seq, state, 0
                row.last_reason = f"released: {event.cause.value}"

    def alarmed(self, event: Alarm) -> None:
        """Take in an alarm. Engine thread."""
        with self._lock:
            self._alarms.append(
                RaisedAlarm(time.time(), event.namespace, event.message, event.field)
            )

    def calm(self, namespace: Namespace) -> None:
        """A replay: what was alarming there is over. Engine thread."""
        if not self._alarms:  # nearly always
            return
        with self._lock:
            for index, alarm in enumerate(self._alarms):
                if alarm.namespace is namespace and alarm.is_active:
                    self._alarms[index] = replace(alarm, is_active=False)

    def _append(self, observation: Observation) -> None:
        run = self._run
        if run is not None and _continues(run, observation):
            run.count += 1
            run.tokens += observation.tokens
            run.host_ns += observation.host_ns
            return
        self._end_run()
        is_alone = observation.namespace is Namespace.PROMPT or observation.capture_ns
        if is_alone or observation.kind is Kind.RELEASED:
            self._push(observation)
        else:
            self._run = observation

    def _end_run(self) -> None:
        if self._run is not None:
            self._push(self._run)
            self._run = None

    def _push(self, observation: Observation) -> None:
        self._seq += 1
        observation.seq = self._seq
        self._observations.append(observation)

    def _change(self, identity: GraphIdentity, change: Callable[[Row], None]) -> None:
        row = self._rows.get(identity)
        if row is None:
            if len(self._rows) >= MAX_ROWS:
                self._forget_one()
            self._num_identities += 1
            row = self._rows[identity] = Row(self._num_identities, identity)
        change(row)
        # A run of decode is told later than the row: its seq is the next to be given.
        row.seq = self._seq + (self._run is not None)

    def _forget_one(self) -> None:
        """Forget the oldest row that holds nothing; there always is one in a cache's bounds."""
        oldest = next((i for i, row in self._rows.items() if not row.num_bytes), None)
        del self._rows[oldest if oldest is not None else next(iter(self._rows))]


class _Probe:
    """Listens to one engine. Lives as long as its event log; engine thread only."""

    def __init__(self, watch: GraphWatch, cache: GraphCache, inner: StepObserver | None) -> None:
        self.watch = watch
        self._cache = cache
        self._inner = inner  # the observer that was there before
        selection = cache.selection
        self._policies = {Namespace.PROMPT: selection.prompt, Namespace.DECODE: selection.decode}
        # Of the step that runs: how it was answered, and what else happened in it.
        self._answer: Direct | Replayed | None = None
        self._seeded: Seeded | None = None
        self._refused: Refused | None = None
        self._aside_ns = 0  # that captures and releases took
        self._start_ns = 0
        self._start_seconds = 0.0

    def before(self, plan: StepPlan) -> None:
        """Start the clock of a step."""
        if self._inner is not None:
            self._inner.before(plan)
        self._answer = self._seeded = self._refused = None
        self._aside_ns = 0
        self._start_seconds = time.time()
        self._start_ns = time.perf_counter_ns()

    def after(self, plan: StepPlan, logits: Any) -> None:
        """Tell of the step: its work is submitted (on a CPU: done)."""
        elapsed_ns = time.perf_counter_ns() - self._start_ns - self._aside_ns
        if self._answer is not None:
            self._tell(self._answer, plan, elapsed_ns)
        if self._inner is not None:
            self._inner.after(plan, logits)

    def take(self, event: Event) -> None:
        """The log's subscriber."""
        match event:
            case Direct() | Replayed():
                self._answer = event
            case Seeded() if self._captures_between_steps(event):
                self._tell_captured(event)
            case Seeded():
                self._aside_ns += event.capture_ns + event.instantiate_ns
                self._seeded = event
            case Refused() if self._captures_between_steps(event):
                self._tell_refused(event)
            case Refused():
                self._refused = event
            case Released():
                self._aside_ns += event.elapsed_ns
                self.watch.released(event, self._state_of)
            case Alarm():
                self.watch.alarmed(event)

    def _tell(self, answer: Direct | Replayed, plan: StepPlan, elapsed_ns: int) -> None:
        seeded, refused = self._seeded, self._refused
        kind, why = _kind_of(answer, refused)
        capture_ns = 0 if seeded is None else seeded.capture_ns + seeded.instantiate_ns
        identity = answer.identity
        state = self._state_of(identity)

        def change(row: Row) -> None:
            if seeded is not None:
                _take_executable(row, seeded)
            if state is not None:
                row.state = state
            if isinstance(answer, Replayed):
                row.num_replayed += 1
                row.replay_ns.append(elapsed_ns)
            else:
                row.num_direct += 1
                row.direct_ns.append(elapsed_ns)
                row.last_reason = why

        observation = Observation(
            self._start_seconds, answer.namespace, kind, plan.num_tokens, plan.seq_capacity,
            host_ns=elapsed_ns, capture_ns=capture_ns, why=why,
        )  # fmt: skip
        self.watch.observed(observation, identity, change)
        if kind is Kind.REPLAYED:
            self.watch.calm(answer.namespace)

    def _tell_captured(self, event: Seeded) -> None:
        capture_ns = event.capture_ns + event.instantiate_ns
        state = self._state_of(event.identity) or State.PROVEN

        def change(row: Row) -> None:
            _take_executable(row, event)
            row.state = state

        observation = Observation(
            time.time() - capture_ns / 1e9, event.namespace, Kind.SEEDED,
            batch=_batch_of(event.identity), capture_ns=capture_ns, why="captured between steps",
        )  # fmt: skip
        self.watch.observed(observation, event.identity, change)

    def _tell_refused(self, event: Refused) -> None:
        why = _refusal(event)

        def change(row: Row) -> None:
            row.state, row.last_reason = State.REFUSED, why

        observation = Observation(
            time.time(), event.namespace, Kind.REFUSED, batch=_batch_of(event.identity), why=why
        )
        self.watch.observed(observation, event.identity, change)

    def _captures_between_steps(self, event: Seeded | Refused) -> bool:
        is_launch = isinstance(event, Refused) and event.reason is Reason.LAUNCH_FAILED
        return self._policies[event.namespace] is Policy.RESIDENT and not is_launch

    def _state_of(self, identity: GraphIdentity) -> State | None:
        entry = self._cache.spaces[identity.namespace].entries.get(identity)
        return None if entry is None else entry.state


def _kind_of(answer: Direct | Replayed, refused: Refused | None) -> tuple[Kind, str]:
    if isinstance(answer, Replayed):
        return Kind.REPLAYED, ""
    if refused is not None:
        return Kind.REFUSED, _refusal(refused)
    match answer.why:
        case Why.SEEDING:
            return Kind.SEEDED, answer.why.value
        case Why.REFUSED | Why.QUARANTINED | Why.LAUNCH_FAILED:
            return Kind.REFUSED, answer.why.value
        case _:
            return Kind.DIRECT, answer.why.value


def _refusal(event: Refused) -> str:
    return f"{event.reason.value}: {event.detail}"


def _take_executable(row: Row, event: Seeded) -> None:
    row.num_seeded += 1
    row.num_nodes, row.num_bytes = event.num_nodes, event.num_bytes
    row.capture_ns, row.instantiate_ns = event.capture_ns, event.instantiate_ns


def _copied(row: Row) -> Row:
    return replace(row, direct_ns=row.direct_ns.copy(), replay_ns=row.replay_ns.copy())


def _continues(run: Observation, observation: Observation) -> bool:
    """Whether an observation of decode is told with the ones before it."""
    return (
        observation.namespace is run.namespace
        and observation.kind is run.kind
        and observation.batch == run.batch
        and observation.why == run.why
        and not observation.capture_ns
        and observation.at_seconds - run.at_seconds < RUN_SECONDS
    )


def _batch_of(identity: GraphIdentity) -> int:
    batch = identity.get("batch")
    return batch if isinstance(batch, int) else 0
