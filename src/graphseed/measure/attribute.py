"""Measures where the host's time goes in a model's prompt path, and what replay saves.

Owns the order of things: the direct path without a profiler, the launch gap, the same chunks under
the profiler with a prediction of their replay, and, in a call of its own, the replay. Until
`measure_replay` no graph of the model exists. What the figures are and how a replay is predicted is
attribution's; what they mean in words is verdict's. Does not print.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Final

import numpy as np

from graphseed.capture.driver import Driver
from graphseed.capture.events import Event, Refused, Replayed, Seeded
from graphseed.capture.identity import Namespace
from graphseed.engine.plan import StepPlan
from graphseed.measure.attribution import ChunkGrid, Direct, Prediction, Replay, Timing
from graphseed.measure.launch_gap import LaunchGap, calibrate, measure_line
from graphseed.measure.policies import POLICIES
from graphseed.measure.profile import profile_work
from graphseed.measure.session import Session
from graphseed.models.model import Model

MIN_RUNS: Final = 3
MAX_RUNS: Final = 30
MAX_PROFILED: Final = 5
BUDGET_MS: Final = 2000.0  # of one thing that is timed, where MIN_RUNS allow it

Watch = Callable[[str], None]  # told what is about to be measured


def measure_direct(
    model: Model, driver: Driver, grid: ChunkGrid, watch: Watch, trace: Path | None = None
) -> tuple[LaunchGap, list[Direct]]:
    """Time and profile every cell without a graph of the model, and predict its replay.

    Everything is timed before the profiler is loaded for the first time, which may cost something
    ever after. `trace` gets a Chrome trace of one chunk of the first cell.
    """
    with ExitStack() as stack:
        benches = {}
        for context in grid.contexts:
            watch(f"context {context}: filling")
            benches[context] = stack.enter_context(_Bench(model, driver, grid, context, "off"))
        timed = []
        for context, chunk in product(grid.contexts, grid.chunks):
            watch(f"context {context}, chunk {chunk}: direct")
            bench = benches[context]
            [(wall, host_ms)] = bench.time(chunk, bench.session.run)
            timed.append((bench, chunk, wall, host_ms, bench.stage_ms(chunk)))
        watch("launch gap")
        gap = calibrate(driver, measure_line(driver))
        cells = []
        for bench, chunk, wall, host_ms, stage_ms in timed:
            watch(f"context {bench.context}, chunk {chunk}: profile")
            num_runs = _num_runs(wall.median_ms, 1, MAX_PROFILED)
            profile = profile_work(driver, bench.preparer(chunk), num_runs, trace)
            trace = None
            prediction = Prediction(
                stage_ms, gap.launch_us / 1e3, profile.busy_ms - profile.copy_in_ms,
                profile.num_nodes, gap.gap_us,
            )  # fmt: skip
            cells.append(Direct(chunk, bench.context, wall, host_ms, profile, prediction))
        return gap, cells


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
    seen = _Seen()
    bench.session.core.log.subscribe(seen)
    bench.preparer(chunk)()()  # the seed: captured, then direct
    runner = bench.session.core.runner
    (wall, host_ms), (direct, _) = bench.time(chunk, bench.session.run, runner.run_direct)
    told = Replay(chunk, bench.context, num_nodes=seen.num_nodes)
    if seen.num_replayed == wall.num_runs + 1:  # one is not counted
        return replace(told, wall=wall, direct=direct, host_ms=host_ms)
    why = seen.refused or "no executable was there; see the log"
    return replace(told, refused=f"{seen.num_replayed} of {wall.num_runs + 1} replayed: {why}")


class _Seen:
    """What the cache said of one cell."""

    def __init__(self) -> None:
        self.num_replayed = 0
        self.num_nodes = 0
        self.refused = ""

    def __call__(self, event: Event) -> None:
        match event:
            case Replayed():
                self.num_replayed += 1
            case Seeded():
                self.num_nodes = event.num_nodes
            case Refused():
                self.refused = f"{event.reason.value}: {event.detail}"


class _Bench(AbstractContextManager["_Bench"]):
    """One context under one policy, filled with random tokens. Closed by whoever made it."""

    def __init__(
        self, model: Model, driver: Driver, grid: ChunkGrid, context: int, policy: str
    ) -> None:
        self.context = context
        self._driver = driver
        self._random = np.random.default_rng()
        self._vocab_size = model.vocab_size
        self.session = Session(model, driver, grid.config(context), POLICIES[policy])
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
