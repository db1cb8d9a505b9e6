"""The life of an entry: states are words, edges are a table, one function moves.

Owns State, EDGES and Entry. Does not know when to move: that is the cache's policy.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from graphseed.capture.driver import Executable, Mark, Work
from graphseed.capture.errors import IllegalMove, Reason
from graphseed.capture.identity import GraphIdentity


class State(Enum):
    """Where an identity stands in this process."""

    UNSEEN = "unseen"
    OBSERVED = "observed"  # (resident) ran direct once; capture waits for settle()
    SEEDED = "seeded"  # has an executable; its direct run is not known to have completed
    PROVEN = "proven"  # has an executable and a completed direct run: replays
    TRUSTED = "trusted"  # a replay was compared with the direct path and equal
    QUARANTINED = "quarantined"  # a replay differed: direct until a new generation
    REFUSED = "refused"  # cannot be captured: direct, with a reason
    RELEASED = "released"  # had an executable or an observation; given back


EDGES: Final[dict[State, frozenset[State]]] = {
    State.UNSEEN: frozenset({State.OBSERVED, State.SEEDED, State.REFUSED}),
    State.OBSERVED: frozenset({State.PROVEN, State.REFUSED, State.RELEASED}),
    State.SEEDED: frozenset({State.PROVEN, State.UNSEEN, State.RELEASED}),
    State.PROVEN: frozenset({State.TRUSTED, State.QUARANTINED, State.REFUSED, State.RELEASED}),
    State.TRUSTED: frozenset({State.REFUSED, State.RELEASED}),
    State.QUARANTINED: frozenset({State.UNSEEN}),
    State.REFUSED: frozenset({State.UNSEEN}),
    State.RELEASED: frozenset({State.UNSEEN}),
}

HELD: Final = frozenset({State.OBSERVED, State.SEEDED, State.PROVEN, State.TRUSTED})


@dataclass(slots=True)
class Entry:
    """One identity's state and handles. Owned by its namespace in the cache; engine thread only."""

    identity: GraphIdentity
    state: State = State.UNSEEN
    executable: Executable | None = None
    direct_done: Mark | None = None  # set after the direct run, cleared once seen done (I3)
    pending: Work | None = None  # what settle() will capture
    root: str | None = None  # first node in the driver's words, fixed at the first seed (I6)
    reason: Reason | None = None  # of the last refusal
    num_observations: int = 0
    num_seeds: int = 0
    num_replays: int = 0
    num_attempts: int = 0  # refused captures in a row, for the back-off
    retry_at: int | None = None  # observation count at which a transient refusal is tried again
    capture_ns: int = 0
    instantiate_ns: int = 0

    @property
    def is_held(self) -> bool:
        """Whether it holds an executable or an observation that a release gives back."""
        return self.state in HELD

    def move(self, to: State) -> None:
        """The only way a state changes. Raises IllegalMove off the table."""
        if to not in EDGES[self.state]:
            raise IllegalMove(
                f"entry [{self.identity}] cannot go from {self.state.value} to {to.value}"
            )
        self.state = to
        if to not in HELD:
            self.executable = None
            self.direct_done = None
            self.pending = None
