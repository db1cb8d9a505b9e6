"""What a graph of near-empty kernels costs on this device: the launch, and each node.

Owns LaunchGap and its calibration, through the driver's arenas alone. The kernel adds 1 to a tensor
of one element, so every node depends on the one before it. Two lengths give a line: its intercept
is what a launch costs whatever it holds, its slope what a node costs. The profiler says how long
that same kernel takes in a direct run; the difference to the slope is the gap. It can be negative:
a kernel that runs by itself, as in a direct run, is charged for a start that a graph overlaps with
the end of the kernel before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from graphseed.capture.driver import Arena, Driver, Executable
from graphseed.capture.identity import Namespace
from graphseed.measure.profile import profile_work

NODES: Final = (256, 1280)  # a prompt graph has a few hundred to two thousand
NUM_LAUNCHES: Final = 30
NUM_DIRECT: Final = 256  # kernels of the profiled direct run
NUM_PROFILED: Final = 5


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
    kernel_us: float  # of that kernel in a direct run, by the profiler

    @property
    def gap_us(self) -> float:
        """To be added to a kernel's time in a direct run for its time in a graph."""
        return self.node_us - self.kernel_us


def measure_line(driver: Driver) -> GraphLine:
    """Capture, instantiate and launch graphs of near-empty kernels. No model is needed.

    Run it before anything was profiled: a profiler that was loaded may still cost something.
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


def calibrate(driver: Driver, line: GraphLine) -> LaunchGap:
    """Profile the kernel of `line` in a direct run, and put both together."""
    chain = _chain(driver, NUM_DIRECT)
    direct = profile_work(driver, lambda: chain, NUM_PROFILED)
    return LaunchGap(line.launch_us, line.node_us, 1e3 * direct.busy_ms / direct.num_nodes)


def _graph(driver: Driver, arena: Arena, num_nodes: int) -> Executable:
    chain = _chain(driver, num_nodes)
    chain()  # a kernel's first launch loads it
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
    """Work of `num_nodes` kernels, each of which needs the one before."""
    counter = torch.zeros(1, device=driver.device)

    def work() -> None:
        with torch.no_grad():
            for _ in range(num_nodes):
                counter.add_(1.0)

    return work
