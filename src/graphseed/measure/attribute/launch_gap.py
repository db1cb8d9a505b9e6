"""What a graph of near-empty kernels costs on this device: the launch, and each node.

Owns LaunchGap and its calibration, through the driver's arenas alone. Graphs of two lengths give a
line: its intercept is what a launch costs whatever it holds, its slope what a node costs. The
profiler says how long the same kernels take in a direct run, on average; the difference to the
slope is the gap between two nodes.

The kernels are near-empty, but they are no kernels of one element: one block on one multiprocessor
starts and ends faster than a model's kernels do. A kernel that fills the device hands blocks to
every multiprocessor and is done with the slowest of them, what it wrote must be seen by all before
the next one reads it, and a next one of another kind finds none of its code, constants and launch
parameters in place. So the tensor has several blocks for each multiprocessor, and four kinds of
kernel take turns, each reading what the one before it wrote. The gap is still one figure, of
elementwise kernels; it can be negative: a kernel that runs by itself, as in a direct run, is
charged for a start that a graph overlaps with the end of the kernel before. On a host a node is a
call of the recording, and the profiler's own cost is in what it says of a kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Final

import torch

from graphseed.capture.driver import Arena, Driver, Executable
from graphseed.capture.identity import Namespace
from graphseed.measure.attribute.profile import profile_work

NODES: Final = (256, 1280)  # a prompt graph has a few hundred to two thousand; of whole rounds
NUM_LAUNCHES: Final = 30
NUM_DIRECT: Final = 256  # kernels of the profiled direct run
NUM_PROFILED: Final = 5
ROW_LEN: Final = 4096  # float32 for each multiprocessor: several blocks, and 16 KiB


@dataclass(frozen=True, slots=True)
class GraphLine:
    """Wall time of a graph of near-empty kernels: launch_us + nodes * node_us."""

    launch_us: float
    node_us: float

    @classmethod
    def through(cls, points: tuple[tuple[int, float], tuple[int, float]]) -> "GraphLine":
        """The line through two (nodes, milliseconds)."""
        (few, few_ms), (many, many_ms) = points
        node_us = 1e3 * (many_ms - few_ms) / (many - few)
        # Noise can tilt the line; no launch takes less than no time.
        return cls(max(0.0, 1e3 * few_ms - few * node_us), node_us)


@dataclass(frozen=True, slots=True)
class LaunchGap:
    """The calibration of one device, in one process."""

    launch_us: float  # from an idle device to the end of a graph, nodes aside
    node_us: float  # for each near-empty node of a graph
    kernel_us: float  # of these kernels in a direct run, by the profiler, on average

    @property
    def gap_us(self) -> float:
        """To be added to a kernel's time in a direct run for its time in a graph."""
        return self.node_us - self.kernel_us


def measure_line(driver: Driver) -> GraphLine:
    """Capture, instantiate and launch graphs of near-empty kernels. No model is needed.

    Run it where nothing was profiled: a profiler that was loaded still costs something.
    Raises CannotCapture where this device cannot capture.
    """
    arena = driver.open(Namespace.PROMPT)
    try:
        graphs = [_graph(driver, arena, num_nodes) for num_nodes in NODES]
        # In turn, so that both lengths see the same machine; the least disturbed launch counts.
        times_ms = [[_launch_ms(driver, arena, g) for g in graphs] for _ in range(NUM_LAUNCHES)]
        few_ms, many_ms = (min(column) for column in zip(*times_ms, strict=True))
        for graph in graphs:
            arena.release(graph)
    finally:
        arena.close()
    return GraphLine.through(((NODES[0], few_ms), (NODES[1], many_ms)))


def profile_kernel(driver: Driver) -> float:
    """Microseconds of the kernels of `measure_line` in a direct run: the mean of all kinds."""
    chain = _chain(driver, NUM_DIRECT)
    direct = profile_work(driver, lambda: chain, NUM_PROFILED)
    return 1e3 * direct.busy_ms / direct.num_nodes


def _graph(driver: Driver, arena: Arena, num_nodes: int) -> Executable:
    chain = _chain(driver, num_nodes)
    chain()  # the first launch of a kind loads it
    driver.synchronize()
    executable = arena.instantiate(arena.capture(chain))
    if executable.num_nodes != num_nodes:
        raise RuntimeError(f"a graph of {num_nodes} kernels has {executable.num_nodes} nodes")
    return executable


def _launch_ms(driver: Driver, arena: Arena, executable: Executable) -> float:
    driver.synchronize()
    before = driver.mark(timed=True)
    arena.launch(executable)
    after = driver.mark(timed=True)
    after.wait()
    return after.ms_since(before)


def _chain(driver: Driver, num_nodes: int) -> Callable[[], None]:
    """Work of `num_nodes` kernels of four kinds in turn, each of which needs the one before."""
    values = torch.zeros(driver.num_sms, ROW_LEN, device=driver.device)
    row = torch.ones(ROW_LEN, device=driver.device)
    # None of them grows what it is given without end.
    kinds: tuple[Callable[[], object], ...] = (
        partial(values.mul_, 0.5),
        partial(values.add_, row),
        partial(values.clamp_, -1.0, 1.0),
        values.neg_,
    )

    def work() -> None:
        with torch.no_grad():
            for kind in islice(cycle(kinds), num_nodes):
                kind()

    return work
