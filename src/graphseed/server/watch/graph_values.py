"""What is kept of prompt graphs: observations, rows of identities, alarms.

Owns these values. Does not know who fills them in (GraphWatch) or who shows them.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from graphseed.capture.entry import State
from graphseed.capture.identity import GraphIdentity, Namespace

NUM_TIMES: Final = 15  # of the last runs of an identity, for their medians


class Kind(Enum):
    """How an observation was answered, or what else happened to graphs."""

    DIRECT = "direct"
    SEEDED = "seeded"  # captured and instantiated; that observation itself ran direct
    REPLAYED = "replayed"
    REFUSED = "refused"  # ran direct, because it cannot be captured
    RELEASED = "released"


# Values that are made at each step are plain: frozen ones cost the engine's thread twice the time.
@dataclass(slots=True)
class Observation:
    """One thing that happened, or `count` alike of decode. Not changed once it is told."""

    at_seconds: float  # of the Unix clock, at its beginning
    namespace: Namespace
    kind: Kind
    tokens: int = 0  # real ones, without padding
    batch: int = 0  # sequences, padding included
    count: int = 1
    host_ns: int = 0  # that the host took, captures and releases excluded
    capture_ns: int = 0  # capture and instantiate
    why: str = ""
    seq: int = 0  # grows by one with each thing told


@dataclass(slots=True)
class Row:
    """One identity so far. Changed under the watch's lock; readers get copies."""

    number: int  # of the identity, in its engine
    identity: GraphIdentity
    seq: int = 0  # of the last change
    state: State = State.UNSEEN
    num_direct: int = 0
    num_seeded: int = 0
    num_replayed: int = 0
    num_nodes: int = 0  # of the last executable
    num_bytes: int = 0  # held now
    capture_ns: int = 0
    instantiate_ns: int = 0
    # What the last runs took on the host, captures and releases excluded.
    direct_ns: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    replay_ns: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    last_reason: str = ""  # why it last ran direct, or was given back


@dataclass(frozen=True, slots=True)
class RaisedAlarm:
    """An alarm, and whether a replay has answered it since."""

    at_seconds: float
    namespace: Namespace
    message: str
    field: str | None
    is_active: bool = True


@dataclass(frozen=True, slots=True)
class Seen:
    """What a reader gets: everything that changed after the `seq` it had."""

    epoch: int  # changes with each engine: rows of another one mean nothing
    seq: int
    num_missed: int  # observations that were dropped before they were read
    observations: tuple[Observation, ...]
    rows: tuple[Row, ...]
    alarms: tuple[RaisedAlarm, ...]
    tokens: dict[Namespace, int]  # real ones, in steps so far
