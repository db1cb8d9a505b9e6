"""What a graph costs beyond the work in it: the launch, and the gap between two nodes. Pure.

Owns Point and LaunchGap. Two near-empty decoders of different depth are replayed, as any chunk is,
and profiled on the direct path, in a process of its own. What their replays take beyond stage and
busy time lies on a line over the number of nodes: its slope is the gap, its value at no node at all
is the launch. Nothing of the user's model is in it.

They are decoders and not chains of elementwise kernels: the matrix products, reductions and
attention of a model (shared memory, registers, prologues) need more between them than those show.
Measured on an H200 (torch 2.11, bf16): graphs of elementwise kernels that fill the device gave a
gap of 0.00-0.03 us, of one-element kernels 0.16 us, while the replays of six models, of 679 to
1,619 nodes, needed 0.36-0.64 us a node at chunks of 32 and 128 tokens, falling to 0.15-0.36 at
2,048 (but for one of 0.93). With the gap of elementwise kernels 6 of 24 predictions were 15 to 20 %
low.

The gap is still one figure for all nodes, that of small chunks: where kernels are long, it matters
less and is a little too large. Either figure can be negative, through noise or because a kernel
that runs by itself is charged for a start that a graph overlaps; it is reported as it is. On a host
a node is a call of the recording, and the profiler's own cost is in what it says of a kernel, which
the gap then takes away again. Measures nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graphseed.measure.attribute.profile import ChunkProfile


@dataclass(frozen=True, slots=True)
class DecoderTimes:
    """A near-empty decoder, replayed without a profiler."""

    replay_ms: float  # wall time of the least disturbed replay
    stage_ms: float  # of it, of the host, for writing the chunk's inputs


@dataclass(frozen=True, slots=True)
class Point:
    """A near-empty decoder, replayed and profiled; the figures mean what a prediction's do."""

    num_nodes: int
    replay_ms: float
    busy_ms: float  # of the direct run that was least busy, without the staged copy
    stage_ms: float

    @property
    def rest_ms(self) -> float:
        """What is neither staging nor a kernel: launch + nodes x gap."""
        return self.replay_ms - self.stage_ms - self.busy_ms


@dataclass(frozen=True, slots=True)
class LaunchGap:
    """The calibration of one device: the line through two points of different length."""

    few: Point
    many: Point

    @classmethod
    def of(cls, times: Sequence[DecoderTimes], profiles: Sequence[ChunkProfile]) -> "LaunchGap":
        """Put both sides of two decoders together, the shallow one first."""
        few, many = (
            Point(seen.num_nodes, one.replay_ms, seen.busy_ms - seen.copy_in_ms, one.stage_ms)
            for one, seen in zip(times, profiles, strict=True)
        )
        return cls(few, many)

    @property
    def gap_us(self) -> float:
        """To be added to a kernel's time in a direct run for its time in a graph."""
        rest_ms = self.many.rest_ms - self.few.rest_ms
        return 1e3 * rest_ms / (self.many.num_nodes - self.few.num_nodes)

    @property
    def launch_us(self) -> float:
        """From an idle device to the end of a graph: what is there whatever the graph holds."""
        return 1e3 * self.few.rest_ms - self.few.num_nodes * self.gap_us
