"""Every error of graphseed's core, and the closed list of reasons a graph may be refused for.

    GraphseedError                 the root: `except graphseed.GraphseedError` catches all of ours
    |-- SelectorError              a selector of the environment or the command line means nothing
    |-- CannotCapture              a driver's word to the cache: this graph is refused, and why
    |-- LaunchFailed               a driver's word to the cache: a launch was not accepted
    |-- DeviceLost                 the device context is poisoned; this process can run no more
    |-- IllegalMove                an entry was moved along an edge that is not in the table (a bug)
    |-- Closed                     the cache, arena or engine was used after it was closed
    `-- WrongThread                something but the engine's thread touched graphs

The layers above add their own under GraphseedError (models.errors, engine.errors).
"""

from enum import Enum


class GraphseedError(Exception):
    """Root of every error that graphseed raises on purpose."""


class SelectorError(GraphseedError, ValueError):
    """A selector holds a value that means nothing. Raised at start, never guessed around."""


class DeviceLost(GraphseedError, RuntimeError):
    """The device context is poisoned by an earlier error; only a new process helps."""


class LaunchFailed(GraphseedError):
    """A driver could not submit an executable, and nothing of it ran; the cache runs direct."""


class IllegalMove(GraphseedError, RuntimeError):
    """An entry was asked to move along an edge that the table does not have."""


class Closed(GraphseedError, RuntimeError):
    """The object was closed before this call."""


class WrongThread(GraphseedError, RuntimeError):
    """Graphs belong to the one thread that first used the cache."""


class Reason(Enum):
    """Why a graph runs direct (I8). The list is closed: a driver maps what it sees onto it."""

    # Permanent: true until the generation changes.
    HOST_SYNC = "host synchronisation"  # .item(), a data-dependent shape, a wait on the device
    HOST_MEMORY = "host memory"  # a copy to or from memory of the host was recorded
    RANDOM = "random numbers"  # replay could not draw what the direct path would have drawn
    UNSUPPORTED_NODE = "unsupported node"  # the recording holds what the driver cannot replay
    ALLOCATOR = "allocator without graph pools"  # cudaMallocAsync, for one
    EMPTY_GRAPH = "empty graph"  # nothing was recorded
    FIRST_NODE_DIFFERED = "first node differed"  # the step declared another first node
    WORK_RAISED = "the step raised"  # an ordinary exception while recording
    DRIVER_RAISED = "the driver raised"  # what no other reason covers
    LAUNCH_FAILED = "launch failed"
    BYTES_DIFFERED = "bytes differed"
    # Transient: retried with back-off.
    MEMORY_FLOOR = "memory floor"  # less memory is free than capture may leave
    OUT_OF_MEMORY = "out of memory"
    INTERFERENCE = "interference by another thread"
    NOT_INITIALISED = "not yet initialised"  # a library cannot be initialised inside a capture

    @property
    def is_transient(self) -> bool:
        """Whether the cache may try again later in the same generation."""
        return self in _TRANSIENT


_TRANSIENT = frozenset(
    {Reason.MEMORY_FLOOR, Reason.OUT_OF_MEMORY, Reason.INTERFERENCE, Reason.NOT_INITIALISED}
)


class CannotCapture(GraphseedError):
    """A driver refuses to capture or instantiate; the cache answers by the direct path."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail
