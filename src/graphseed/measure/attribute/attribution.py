"""What `graphseed attribute` finds: the figures of a chunk on both paths, and their ratios. Pure.

Owns which cells there are (ChunkGrid), the prediction of a replay and its terms:

    stage    the host writes a chunk's inputs, as in a direct run
  + launch   what a launch costs whatever it holds (launch_gap)
  + busy     the device's work in a direct chunk, by the profiler, without the staged copy
  + nodes x gap    what lies between two dependent nodes of a graph (launch_gap)

It takes a kernel to last as long in a graph as in a direct run, but for the gap, and nodes to run
one after the other. The gap is one figure for all nodes, that of near-empty decoders. It does not
know caches that stay warm when kernels follow at once, nor clocks that fall under load. Measures
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Final

from graphseed.engine.config import EngineConfig
from graphseed.engine.errors import BadParameter
from graphseed.measure.attribute.launch_gap import DecoderTimes, LaunchGap
from graphseed.measure.attribute.profile import ChunkProfile

FILL_LEN: Final = 512  # tokens of a step that fills a context


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Which chunks are measured, and in which engine. Raises BadParameter.

    Every chunk of a context runs in one engine, as it would for a user: kernel plans depend on the
    engine's context length, so a chunk of 32 tokens is measured where one of 2,048 fits.
    """

    chunks: tuple[int, ...]  # tokens
    contexts: tuple[int, ...] = (0,)  # tokens before the chunk
    context_len: int = 0  # of the engine; 0: the longest context and the largest chunk

    def __post_init__(self) -> None:
        for name, values, least in (("--chunks", self.chunks, 1), ("--contexts", self.contexts, 0)):
            if not values or min(values) < least or len(set(values)) < len(values):
                expected = f"different whole numbers from {least}, comma-separated"
                raise BadParameter(name, ",".join(map(str, values)), expected)
        needed = max(self.contexts) + max(self.chunks)
        if self.context_len and self.context_len < needed:
            expected = f"at least {needed}: the longest context and the largest chunk"
            raise BadParameter("context_len (-c)", self.context_len, expected)

    @property
    def num_cells(self) -> int:
        """Combinations of chunk and context."""
        return len(self.chunks) * len(self.contexts)

    def config(self, context: int) -> EngineConfig:
        """The engine of one context."""
        return EngineConfig(
            # At least 2, as the engine asks.
            context_len=self.context_len or max(2, context + max(self.chunks)),
            num_ubatch=max(*self.chunks, min(context, FILL_LEN)),
            reuses_prefixes=False,
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """Repetitions of one measurement."""

    median_ms: float
    spread_ms: float  # between the quartiles
    num_runs: int
    least_ms: float

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> "Timing":
        """Summarise at least two repetitions."""
        low, middle, high = quantiles(samples_ms, n=4, method="inclusive")
        return cls(middle, high - low, len(samples_ms), min(samples_ms))


@dataclass(frozen=True, slots=True)
class Timed:
    """One chunk on the direct path, without a profiler."""

    chunk: int
    context: int
    wall: Timing  # from an idle device to the end of the chunk on it
    host_ms: float  # of wall, until everything was submitted
    stage_ms: float  # of the host, for writing the chunk's inputs


@dataclass(frozen=True, slots=True)
class Profiled:
    """What the profiler saw, in a process of its own."""

    decoders: tuple[ChunkProfile, ...]  # the near-empty ones, the shallow one first
    cells: tuple[ChunkProfile, ...]  # in the order of what was timed


@dataclass(frozen=True, slots=True)
class Prediction:
    """A replayed chunk, in its terms."""

    stage_ms: float
    launch_ms: float
    busy_ms: float
    num_nodes: int
    gap_us: float

    @property
    def ms(self) -> float:
        """Wall time of one replayed chunk."""
        return self.stage_ms + self.launch_ms + self.busy_ms + self.num_nodes * self.gap_us / 1e3


@dataclass(frozen=True, slots=True)
class Direct:
    """One chunk on the direct path, and what is predicted of its replay."""

    chunk: int
    context: int
    wall: Timing  # from an idle device to the end of the chunk on it
    host_ms: float  # of wall, until everything was submitted
    profile: ChunkProfile
    prediction: Prediction

    @property
    def idle_share(self) -> float:
        """Share of a direct chunk in which the device did nothing, 0 to 1.

        Of its wall time; where the host is the device, of its profiled time, inflated as it is: two
        processes of one host differ by more than the share that it is idle.
        """
        whole_ms = self.profile.host_ms if self.profile.is_host else self.wall.median_ms
        return max(0.0, 1.0 - self.profile.busy_ms / whole_ms)

    @property
    def predicted_multiple(self) -> float:
        """Direct wall time over the predicted one."""
        return self.wall.median_ms / self.prediction.ms


def predict(
    times: Sequence[DecoderTimes], timed: Sequence[Timed], profiled: Profiled
) -> tuple[LaunchGap, list[Direct]]:
    """Put both sides of the direct path together, and predict each cell's replay from them."""
    gap = LaunchGap.of(times, profiled.decoders)
    cells = []
    for one, seen in zip(timed, profiled.cells, strict=True):
        busy_ms = seen.busy_ms - seen.copy_in_ms
        prediction = Prediction(
            one.stage_ms, gap.launch_us / 1e3, busy_ms, seen.num_nodes, gap.gap_us
        )
        cells.append(Direct(one.chunk, one.context, one.wall, one.host_ms, seen, prediction))
    return gap, cells


@dataclass(frozen=True, slots=True)
class Replay:
    """One chunk replayed, and run direct again in turn with it; or why it was not replayed."""

    chunk: int
    context: int
    wall: Timing | None = None
    direct: Timing | None = None  # beside it
    host_ms: float = 0.0
    num_nodes: int = 0  # of the graph
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """Both halves of one chunk at one context."""

    direct: Direct
    replay: Replay

    @property
    def multiple(self) -> float | None:
        """Wall time of a direct chunk over a replayed one's, run in turn; None: none replayed."""
        wall, direct = self.replay.wall, self.replay.direct
        return direct.median_ms / wall.median_ms if wall and direct else None

    @property
    def is_noise(self) -> bool:
        """Whether the two sides differ by less than one of them differs from itself."""
        wall, direct = self.replay.wall, self.replay.direct
        if wall is None or direct is None:
            return False
        return abs(direct.median_ms - wall.median_ms) < max(wall.spread_ms, direct.spread_ms)

    @property
    def drift(self) -> float | None:
        """Direct wall time beside the replays over the one measured first, less 1."""
        direct = self.replay.direct
        return direct.median_ms / self.direct.wall.median_ms - 1 if direct else None

    @property
    def error(self) -> float | None:
        """Predicted over measured replay time, less 1."""
        wall = self.replay.wall
        return self.direct.prediction.ms / wall.median_ms - 1 if wall else None
