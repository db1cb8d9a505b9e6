"""One context of one model under one policy: chunks behind it, timed, profiled and replayed.

Owns ContextBench, and how often a thing is repeated. Every repetition has fresh tokens at the same
positions. Models under test and near-empty decoders go through it alike, so that what one shows
holds for the other. Does not know cells, predictions or processes.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Final

import numpy as np

from graphseed.capture.driver import Driver
from graphseed.capture.events import Direct, Event, Refused, Replayed, Seeded
from graphseed.capture.identity import GraphIdentity, Namespace
from graphseed.engine.plan import StepPlan
from graphseed.measure.attribute.attribution import ChunkGrid, Replay, Timing
from graphseed.measure.attribute.profile import MEDIAN, ChunkProfile, profile_work
from graphseed.measure.policies import POLICIES
from graphseed.measure.session import Session
from graphseed.models.model import Model

MIN_RUNS: Final = 3
MAX_RUNS: Final = 30
BUDGET_MS: Final = 2000.0  # of one thing that is timed, where the least number of runs allows it


def num_runs_of(ms: float, least: int, most: int) -> int:
    """How often a thing that takes so long is repeated."""
    return max(least, min(most, int(BUDGET_MS / max(ms, 1e-3))))


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


class ContextBench(AbstractContextManager["ContextBench"]):
    """One context under one policy, filled with random tokens. Closed by whoever made it."""

    def __init__(
        self, model: Model, driver: Driver, grid: ChunkGrid, context: int, policy: str
    ) -> None:
        self.context = context
        self._driver = driver
        self._random = np.random.default_rng()
        self._vocab_size = model.vocab_size
        self._seen = _Seen()
        self._session = Session(model, driver, grid.config(context), POLICIES[policy])
        self._session.core.log.subscribe(self._seen)
        try:
            self._session.core.warm_up()
            self._slot = self._session.slot()
            if context:
                self._session.run_prompt(self._slot.prompt(self._ids(context)))
            driver.synchronize()
        except BaseException:
            self._session.close()
            raise

    def direct(self, chunk: int) -> tuple[Timing, float]:
        """Wall time of a chunk, run as the policy says, and median milliseconds of the host."""
        [timed] = self._time(chunk, self._session.run)
        return timed

    def profile(
        self, chunk: int, num: int, trace: Path | None = None, rank: float = MEDIAN
    ) -> ChunkProfile:
        """Profile a chunk `num` times, as profile_work does. Raises NothingProfiled."""
        for _ in range(2):  # pays for what is built, compiled or tuned once for a shape
            self._prepare(chunk)()
        return profile_work(self._driver, partial(self._prepare, chunk), num, trace, rank)

    def replay(self, chunk: int) -> Replay:
        """Seed a chunk, and time replays and direct runs of it in turn."""
        were_replayed: list[bool] = []

        def run(plan: StepPlan) -> None:
            self._session.run(plan)
            were_replayed.append(self._seen.is_replayed)

        # The seed: captured, then direct. A replay already where the context was filled in chunks
        # of this size, and as good.
        self._prepare(chunk)()
        ways = (run, self._session.core.runner.run_direct)
        (wall, host_ms), (direct, _) = self._time(chunk, *ways)
        identity = self._seen.identity
        num_nodes = self._seen.num_nodes.get(identity, 0)
        num_replayed = sum(were_replayed[-wall.num_runs :])  # of those that are timed
        if num_replayed == wall.num_runs:
            return Replay(chunk, self.context, wall, direct, host_ms, num_nodes)
        why = self._seen.refused.get(identity, "no executable was there; see the log")
        refused = f"{num_replayed} of {wall.num_runs} replayed: {why}"
        return Replay(chunk, self.context, num_nodes=num_nodes, refused=refused)

    def stage_ms(self, chunk: int) -> float:
        """Median milliseconds of the host for writing a chunk's inputs."""
        staging, times_ms = self._session.core.runner.staging, []
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
        self._session.close()

    def _time(self, chunk: int, *runs: Callable[[StepPlan], object]) -> list[tuple[Timing, float]]:
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
                num_runs = num_runs_of(max(taken[-1][0] for taken in samples), MIN_RUNS, MAX_RUNS)
            turn += 1
        return [
            (Timing.of([wall for wall, _ in taken[1:]]), median(host for _, host in taken[1:]))
            for taken in samples
        ]

    def _timed(self, run: Callable[[StepPlan], object], plan: StepPlan) -> tuple[float, float]:
        """Milliseconds of wall, and of the host until everything was submitted."""
        host_ms = 0.0

        def work() -> None:
            nonlocal host_ms
            start_ns = time.perf_counter_ns()
            run(plan)
            host_ms = (time.perf_counter_ns() - start_ns) / 1e6

        return self._session.timed(work), host_ms

    def _prepare(self, chunk: int) -> Callable[[], object]:
        return partial(self._session.run, self._plan(chunk))

    def _plan(self, chunk: int) -> StepPlan:
        # Not cut and padded as a prompt is: every chunk that is asked for is a full one.
        self._slot.rewind(self.context)
        return StepPlan(Namespace.PROMPT, chunk, (self._slot.part(self._ids(chunk)),))

    def _ids(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._vocab_size, num_tokens).tolist()
        return ids
