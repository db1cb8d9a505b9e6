"""The seam between the cache and a device: what a driver promises.

Owns no code that runs: the protocols, and the values that cross them. A driver opens an arena for
each generation of a namespace; an arena has four verbs (capture, instantiate, launch, release),
can mark a point in its stream, and gives its memory back as a whole. Does not know identities,
states or policies: `launch` is the driver's word, `replay` is the cache's choice.
"""

from collections.abc import Callable
from typing import Protocol

from graphseed.capture.identity import FirstNode, Namespace

Work = Callable[[], object]  # one host-pure step (I11): runs twice when seeding, never at replay


class Mark(Protocol):
    """A point in the order of the device's work."""

    def is_done(self) -> bool:
        """Whether everything submitted before the mark has completed."""

    def wait(self) -> None:
        """Block until done. Raises DeviceLost when the work before the mark failed."""

    def ms_since(self, earlier: "Mark") -> float:
        """Milliseconds between two done marks that were made with `timed=True`."""


class Definition(Protocol):
    """A recording that was not executed."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the recording."""

    @property
    def first_node(self) -> FirstNode | None:
        """What the recording begins with, where the driver can tell exactly."""

    @property
    def root(self) -> str:
        """Name of the first node in the driver's own words; equal at every capture of one step."""


class Executable(Protocol):
    """A recording made ready to launch."""

    @property
    def num_nodes(self) -> int:
        """Nodes that one launch runs."""

    @property
    def num_bytes(self) -> int:
        """Device memory that came into use for it (activations shared in an arena count once)."""

    @property
    def result(self) -> object:
        """What the work returned while recorded: valid after a launch, until the next one."""


class Arena(Protocol):
    """Memory and capture stream of one generation of one namespace.

    Opened by a driver, owned and closed by the cache, used by the engine's thread only.
    """

    def capture(self, work: Work) -> Definition:
        """Record `work` without executing it (I1). Raises CannotCapture; then nothing is left."""

    def instantiate(self, definition: Definition) -> Executable:
        """Make a recording executable. Raises CannotCapture."""

    def discard(self, definition: Definition) -> None:
        """Destroy a recording that will not be instantiated."""

    def launch(self, executable: Executable) -> None:
        """Submit one executable. Returns at once where the device is asynchronous.

        Raises LaunchFailed when it was not accepted, DeviceLost when nothing can run any more.
        """

    def release(self, executable: Executable) -> None:
        """Destroy one executable once nothing in flight uses it. The arena keeps its memory."""

    def close(self) -> int:
        """Wait for what is in flight, release all, and return the bytes that came back."""


class Driver(Protocol):
    """One device. Owned by whoever composed the engine; used by the engine's thread."""

    @property
    def device(self) -> str:
        """Name of the device as torch writes it: "cuda:0", "cpu"."""

    def open(self, namespace: Namespace) -> Arena:
        """New arena: a fresh memory pool and a long-lived capture stream.

        Raises CannotCapture when this device cannot capture at all.
        """

    @property
    def description(self) -> str:
        """The device in words, for reports: "NVIDIA H200, driver 580.1"."""

    @property
    def computes_bf16_fast(self) -> bool:
        """Whether bfloat16 matrix products run at least as fast as float32 ones."""

    @property
    def num_sms(self) -> int:
        """Multiprocessors (1 on a host), for kernel plans."""

    def mark(self, timed: bool = False) -> Mark:
        """Mark the present point in the stream that direct runs and launches are submitted to."""

    def prime(self, dtype: str) -> None:
        """Initialise, on the calling thread, the libraries that cannot be inside a capture."""

    def free_bytes(self) -> int:
        """Memory of the device that is free now."""

    def synchronize(self) -> None:
        """Wait for everything submitted. Raises DeviceLost when the context is poisoned."""

    def is_lost(self, error: BaseException) -> bool:
        """Whether `error` left the device context unusable."""
