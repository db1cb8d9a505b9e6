"""What the CUDA driver needs that is not torch: memory figures, a pause of the collector.

Owns MemoryReading and gc_paused. Does not ask a device anything itself.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Free memory of the device, and what this process's allocator has reserved of it."""

    free_bytes: int
    reserved_bytes: int

    def taken_since(self, earlier: "MemoryReading") -> int:
        """Bytes that went out of the device's free memory since then.

        The device's own figure knows what the driver takes for executables, but moves with other
        processes too; the allocator's figure is ours alone and is the least that was taken.
        """
        free = earlier.free_bytes - self.free_bytes
        return max(0, free, self.reserved_bytes - earlier.reserved_bytes)


@contextmanager
def gc_paused() -> Iterator[None]:
    """A collection inside a capture could destroy another graph or unload a module there."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
