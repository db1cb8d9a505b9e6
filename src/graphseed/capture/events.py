"""What happened, as values, and the one log they go to.

Owns the event types, EventLog and the counters (Tally) behind the summary line. Log lines, metrics,
tests and tools all subscribe to one EventLog, so they cannot disagree. Subscribers must not raise.
Does not know what a subscriber does with an event.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from graphseed.capture.errors import Reason
from graphseed.capture.identity import GraphIdentity, Namespace


class Why(Enum):
    """Why an observation was answered by the direct path."""

    POLICY_OFF = "policy off"
    SEEDING = "seeding"  # the first observation (I2)
    OBSERVING = "observed, capture pending"
    REFUSED = "refused"
    QUARANTINED = "quarantined"
    LAUNCH_FAILED = "launch failed"


class Cause(Enum):
    """Why executables were given back."""

    DECODE = "first batch-one decode graph"
    BUDGET = "budget"
    STALE = "stale"
    DIRECT_RAISED = "the direct run raised"
    LAUNCH_FAILED = "launch failed"
    MEMORY = "the device ran out of memory"
    REQUESTED = "requested"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Root of all events."""

    device: str
    namespace: Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct(Event):
    """An observation was answered by the direct path."""

    identity: GraphIdentity
    why: Why


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded(Event):
    """An executable was captured and instantiated, and not launched."""

    identity: GraphIdentity
    num_nodes: int
    num_bytes: int
    capture_ns: int
    instantiate_ns: int
    root: str
    num_seeds: int  # of this identity, this one included


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed(Event):
    """An observation was answered by one launch."""

    identity: GraphIdentity
    num_replays: int  # of this identity, this one included


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """An identity cannot be captured now; it runs direct."""

    identity: GraphIdentity
    reason: Reason
    detail: str
    retry_at: int | None  # observation count of the next try; None: not in this generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Event):
    """Executables were given back; a whole generation unless `is_generation` is False."""

    cause: Cause
    num_entries: int
    bytes_held: int
    bytes_returned: int
    elapsed_ns: int
    is_generation: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale(Event):
    """A binding changed, so every recording of the generation was given back (I7)."""

    num_entries: int
    names: tuple[str, ...]  # of the bindings that changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred(Event):
    """A release waits because admitted prompts are unfinished (I5)."""

    num_unfinished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm(Event):
    """Seeds without replays: what looks like success from outside and is not (I10)."""

    message: str
    field: str | None  # identity field that differed between seeds, when that is the cause


Subscriber = Callable[[Event], None]


class EventLog:
    """Hands each event to every subscriber, in order of subscription. One owner, one thread."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Add a subscriber. It must not raise, and must not keep the engine's thread."""
        self._subscribers.append(subscriber)

    def emit(self, event: Event) -> None:
        """Hand one event to all subscribers."""
        for subscriber in self._subscribers:
            subscriber(event)
