"""Measures where the host's time goes in a model's prompt path, and what replay saves.

Owns three measurements, each of every cell. `measure_direct` times the direct path without a
profiler, `profile_direct` profiles the same chunks, `measure_replay` seeds and replays them. On a
GPU a profiler leaves something behind that makes every later launch of its process dearer (seen on
an H200: 0.9 ms of host for a launch of 1,222 nodes instead of 0.1), so `profile_direct` wants a
process of its own; who gives it one is the caller's to say. Until `measure_replay` no graph of the
model exists. What the figures are and how a replay is predicted is attribution's; what they mean in
words is verdict's. Does not print.
"""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Final

import numpy as np
import torch

from graphseed.capture.driver import Driver
from graphseed.capture.events import Direct, Event, Refused, Replayed, Seeded
from graphseed.capture.identity import GraphIdentity, Namespace
from graphseed.engine.plan import StepPlan
from graphseed.measure.attribute.attribution import ChunkGrid, Profiled, Replay, Timed, Timing
from graphseed.measure.attribute.launch_gap import GraphLine, measure_line, profile_kernel
from graphseed.measure.attribute.profile import profile_work
from graphseed.measure.policies import POLICIES
from graphseed.measure.session import Session
from graphseed.models.model import Model

MIN_RUNS: Final = 3
MAX_RUNS: Final = 30
MAX_PROFILED: Final = 5
BUDGET_MS: Final = 2000.0  # of one thing that is timed, where MIN_RUNS allow it

Watch = Callable[[str], None]  # told what is about to be measured


def measure_direct(
    model: Model, driver: Driver, grid: ChunkGrid, watch: Watch
) -> tuple[GraphLine, list[Timed]]:
    """Time every cell without a profiler, and graphs of near-empty kernels.

    Nothing is kept: the device's memory is given back, to whoever profiles the same model next.
    """
    watch("launch gap")
    line = measure_line(driver)
    timed = []
    for context in grid.contexts:
        watch(f"context {context}: filling")
        with _Bench(model, driver, grid, context, "off") as bench:
            for chunk in grid.chunks:
                watch(f"context {context}, chunk {chunk}: direct")
                [(wall, host_ms)] = bench.time(chunk, bench.session.run)
                timed.append(Timed(chunk, context, wall, host_ms, bench.stage_ms(chunk)))
        del bench
    _give_back(driver)
    return line, timed


def num_profiled(timed: Timed) -> int:
    """How often a chunk that was timed is worth profiling."""
    return _num_runs(timed.wall.median_ms, 1, MAX_PROFILED)


def profile_direct(
    model: Model,
    driver: Driver,
    grid: ChunkGrid,
    nums: Sequence[int],
    watch: Watch,
    trace: Path | None = None,
) -> Profiled:
    """Profile the near-empty kernels, and each cell as often as `nums` says, in their order.

    `trace` gets a Chrome trace of one chunk of the first cell. Raises NothingProfiled.
    """
    watch("launch gap: profile")
    kernel_us = profile_kernel(driver)
    profiles, left = [], iter(nums)
    for context in grid.contexts:
        watch(f"context {context}: filling")
        with _Bench(model, driver, grid, context, "off") as bench:
            for chunk in grid.chunks:
                watch(f"context {context}, chunk {chunk}: profile")
                prepare = bench.preparer(chunk)
                for _ in range(2):  # pays for what is built, compiled or tuned once for a shape
                    prepare()()
                profiles.append(profile_work(driver, prepare, next(left), trace))
                trace = None
    return Profiled(kernel_us, tuple(profiles))


def measure_replay(model: Model, driver: Driver, grid: ChunkGrid, watch: Watch) -> list[Replay]:
    """Seed every cell and time its replays, in the order of `measure_direct`."""
    replays = []
    for context in grid.contexts:
        watch(f"context {context}: filling")
        with _Bench(model, driver, grid, context, "seed") as bench:
            for chunk in grid.chunks:
                watch(f"context {context}, chunk {chunk}: replay")
                replays.append(_replay(bench, chunk))
    return replays


def _replay(bench: "_Bench", chunk: int) -> Replay:
    seen, runner = bench.seen, bench.session.core.runner
    were_replayed: list[bool] = []

    def run(plan: StepPlan) -> None:
        bench.session.run(plan)
        were_replayed.append(seen.is_replayed)

    # The seed: captured, then direct. A replay already where the context was filled in chunks of
    # this size, and as good.
    bench.preparer(chunk)()()
    (wall, host_ms), (direct, _) = bench.time(chunk, run, runner.run_direct)
    num_nodes = seen.num_nodes.get(seen.identity, 0)
    num_replayed = sum(were_replayed[-wall.num_runs :])  # of those that are timed
    if num_replayed == wall.num_runs:
        return Replay(chunk, bench.context, wall, direct, host_ms, num_nodes)
    why = seen.refused.get(seen.identity, "no executable was there; see the log")
    refused = f"{num_replayed} of {wall.num_runs} replayed: {why}"
    return Replay(chunk, bench.context, num_nodes=num_nodes, refused=refused)


def _give_back(driver: Driver) -> None:
    """Give back what torch keeps of a closed session's memory."""
    gc.collect()
    if driver.device != "cpu":
        torch.accelerator.empty_cache()


class _Seen:
    """What the cache said: of the last observation, and of each identity."""

    def __init__(self) -> None:
        self.identity: GraphIdentity | None = None
        self.is_replayed = False
        self.num_nodes: dict[GraphIdentity | None, int] = {}
        self.refused: dict[GraphIdentity | None, str] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case Replayed() | Direct():
                self.identity, self.is_replayed = event.identity, isinstance(event, Replayed)
            case Seeded():
                self.num_nodes[event.identity] = event.num_nodes
            case Refused():
                self.refused[event.identity] = f"{event.reason.value}: {event.detail}"


class _Bench(AbstractContextManager["_Bench"]):
    """One context under one policy, filled with random tokens. Closed by whoever made it."""

    def __init__(
        self, model: Model, driver: Driver, grid: ChunkGrid, context: int, policy: str
    ) -> None:
        self.context = context
        self._driver = driver
        self._random = np.random.default_rng()
        self._vocab_size = model.vocab_size
        self.seen = _Seen()
        self.session = Session(model, driver, grid.config(context), POLICIES[policy])
        self.session.core.log.subscribe(self.seen)
        try:
            self.session.core.warm_up()
            self._slot = self.session.slot()
            if context:
                self.session.run_prompt(self._slot.prompt(self._ids(context)))
            driver.synchronize()
        except BaseException:
            self.session.close()
            raise

    def preparer(self, chunk: int) -> Callable[[], Callable[[], object]]:
        """What makes the next chunk, of fresh tokens, ready to be run."""
        return lambda: partial(self.session.run, self._plan(chunk))

    def time(self, chunk: int, *runs: Callable[[StepPlan], object]) -> list[tuple[Timing, float]]:
        """Wall time of a chunk and median milliseconds of the host, for each way to run it.

        Every repetition has fresh tokens; ways take turns. The first of each is not counted: it
        pays for what is built once for a shape.
        """
        samples: list[list[tuple[float, float]]] = [[] for _ in runs]
        num_runs, turn = 0, 0
        while turn <= num_runs:
            for run, taken in zip(runs, samples, strict=True):
                taken.append(self._timed(run, self._plan(chunk)))
            if turn <= 1:
                num_runs = _num_runs(max(taken[-1][0] for taken in samples), MIN_RUNS, MAX_RUNS)
            turn += 1
        return [
            (Timing.of([wall for wall, _ in taken[1:]]), median(host for _, host in taken[1:]))
            for taken in samples
        ]

    def stage_ms(self, chunk: int) -> float:
        """Median milliseconds of the host for writing a chunk's inputs."""
        staging, times_ms = self.session.core.runner.staging, []
        for _ in range(MAX_RUNS):
            plan = self._plan(chunk)
            self._driver.synchronize()
            start_ns = time.perf_counter_ns()
            staging.stage(plan)
            times_ms.append((time.perf_counter_ns() - start_ns) / 1e6)
        return median(times_ms)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._slot.close()
        self.session.close()

    def _timed(self, run: Callable[[StepPlan], object], plan: StepPlan) -> tuple[float, float]:
        """Milliseconds of wall, and of the host until everything was submitted."""
        host_ms = 0.0

        def work() -> None:
            nonlocal host_ms
            start_ns = time.perf_counter_ns()
            run(plan)
            host_ms = (time.perf_counter_ns() - start_ns) / 1e6

        return self.session.timed(work), host_ms

    def _plan(self, chunk: int) -> StepPlan:
        # Not cut and padded as a prompt is: every chunk that is asked for is a full one.
        self._slot.rewind(self.context)
        return StepPlan(Namespace.PROMPT, chunk, (self._slot.part(self._ids(chunk)),))

    def _ids(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._vocab_size, num_tokens).tolist()
        return ids


def _num_runs(ms: float, least: int, most: int) -> int:
    return max(least, min(most, int(BUDGET_MS / max(ms, 1e-3))))
