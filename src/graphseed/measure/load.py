"""Closed-loop clients: each sends its next request when its last one has ended.

Owns the workload, the clients, what they saw (LoadRun), the measurement of one policy (LoadResult)
and the proof that the bytes of a load are those with graphs disabled. Does not compare policies,
print or draw.

TTFT is queue time plus prompt time, to the nanosecond. Queue time ends when the first chunk is
staged: it is the wait for a slot, and for the step that was running. Prompt time ends with the
first token on the host; the decode steps between a prompt's chunks are in it.
"""

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from graphseed.capture.driver import Driver
from graphseed.capture.events import Cause, Event, Refused, Released, Seeded
from graphseed.capture.identity import Namespace
from graphseed.capture.tally import Counts, Tally
from graphseed.engine import Engine, EngineConfig, EngineCore, Handle, Request, SamplingParams
from graphseed.engine.record import PlanRecorder, ReplayReport, replay
from graphseed.measure.policies import POLICIES
from graphseed.models.model import Model

PROMPT_LENS: Final = (16, 32, 96, 128, 384, 512, 1024, 2048)
NUM_NEW_TOKENS: Final = 32
NUM_SHARED: Final = 256  # tokens that begin every fourth prompt, as far as it is long enough
NUM_WARM_UP: Final = 8  # requests before a measured load, at least
WARM_UP_SEED: Final = 1 << 32  # added to a workload's: its warm-up shares no prefix with it

OnEnd = Callable[[Request], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What a client sends."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Mix:
    """What the requests of a workload are drawn from."""

    token_ids: Sequence[int]
    prompt_lens: Sequence[int] = PROMPT_LENS
    num_new_tokens: int = NUM_NEW_TOKENS


def plain_token_ids(model: Model) -> tuple[int, ...]:
    """Every token id that the model has and the tokenizer does not call special."""
    tokenizer = model.tokenizer
    special = {*tokenizer.all_special_ids, *model.eos_ids}
    special |= {at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(at for at in range(min(model.vocab_size, len(tokenizer))) if at not in special)


def workload(seed: int, num_requests: int, mix: Mix) -> tuple[Job, ...]:
    """Requests of mixed lengths, the same for the same arguments.

    Every fourth prompt begins with the same tokens, every third answer is sampled, the others are
    greedy. All answers have the same length.
    """
    rng = random.Random(seed)
    base = rng.choices(mix.token_ids, k=2 * NUM_SHARED)
    jobs = []
    for index in range(num_requests):
        length = rng.choice(mix.prompt_lens)
        prompt = rng.choices(mix.token_ids, k=length)
        if index % 4 == 0:
            num_shared = min(length - 1, NUM_SHARED)
            prompt[:num_shared] = base[:num_shared]
        params = SamplingParams(max_tokens=mix.num_new_tokens, ignore_eos=True)
        if index % 3 == 0:
            params = replace(params, temperature=0.8, top_k=40, seed=index)
        jobs.append(Job(tuple(prompt), params))
    return tuple(jobs)


def warm_up_of(seed: int, num_clients: int, mix: Mix) -> tuple[Job, ...]:
    """Requests that run before a measured workload of the same seed, one for each client at least.

    No measured prompt is found in the prefix cache for having been in the warm-up.
    """
    return workload(seed + WARM_UP_SEED, max(NUM_WARM_UP, num_clients), mix)


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over the requests of a load."""

    p50: float
    p95: float
    mean: float


def spread_of(values: Sequence[float]) -> Spread:
    """Percentiles, interpolated between neighbours, and the mean."""
    p50, p95 = np.percentile(values, (50, 95))
    return Spread(float(p50), float(p95), float(np.mean(values)))


@dataclass(frozen=True, slots=True)
class Change:
    """How one figure of the same requests differs between two loads, on average."""

    mean: float  # above 0: it grew
    error: float  # standard error of the mean, as if requests did not depend on each other

    @property
    def is_growth(self) -> bool:
        """Whether it grew by more than the noise: two standard errors."""
        return self.mean > 2 * self.error

    @property
    def is_drop(self) -> bool:
        """Whether it fell by more than the noise: two standard errors."""
        return self.mean < -2 * self.error


def change_of(before: Sequence[float], after: Sequence[float]) -> Change:
    """Compare request by request; the lengths of prompts differ more than loads do."""
    each = np.subtract(after, before)
    # One request says nothing about the noise.
    error = float(np.std(each, ddof=1)) / len(each) ** 0.5 if len(each) > 1 else float("inf")
    return Change(float(np.mean(each)), error)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What the clients of one load saw."""

    requests: tuple[Request, ...]  # finished, in the order of the workload
    seconds: float  # from the first client's start to the last one's end

    @property
    def queue_ms(self) -> tuple[float, ...]:
        """Of each request: from its submission to its first chunk staged."""
        return tuple((r.timings.started_ns - r.timings.submitted_ns) / 1e6 for r in self.requests)

    @property
    def prompt_ms(self) -> tuple[float, ...]:
        """Of each request: from its first chunk staged to its first token on the host."""
        return tuple(r.timings.prompt_ms for r in self.requests)

    @property
    def ttft_ms(self) -> tuple[float, ...]:
        """Of each request: queue time and prompt time together."""
        return tuple(q + p for q, p in zip(self.queue_ms, self.prompt_ms, strict=True))

    @property
    def decode_rates(self) -> tuple[float, ...]:
        """Of each request with a second token: tokens per second after the first."""
        return tuple(
            1e3 * (len(r.output_ids) - 1) / r.timings.decode_ms
            for r in self.requests
            if len(r.output_ids) > 1
        )

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests together."""
        return sum(len(r.output_ids) for r in self.requests)

    @property
    def all_rate(self) -> float:
        """New tokens of all clients together, per second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One policy at one number of clients.

    Counts are of the measured load, without its warm-up; the proof is of its first requests, run
    once more.
    """

    policy: str
    num_clients: int
    run: LoadRun
    counts: Mapping[Namespace, Counts]
    capture_ms: float  # capture and instantiate of all seeds together
    num_released_by_decode: int  # prompt graphs
    refused: tuple[str, ...]  # reasons, each once
    # What `resident` held running streams up with, the warm-up's too; captures inside a step are
    # not counted.
    longest_capture_beside_stream_ms: float
    proof: ReplayReport
    num_proven_replays: int  # prompt steps that replayed in what was recorded

    def hit_rate(self, namespace: Namespace) -> float:
        """Share of observations that replayed; 0 where there were none."""
        counts = self.counts[namespace]
        return counts.replayed / max(1, counts.candidates)


def run_load(
    engine: Engine, jobs: Sequence[Job], num_clients: int, on_end: OnEnd | None = None
) -> LoadRun:
    """Let so many clients, each a thread, send the jobs in their order, and wait for all answers.

    `on_end` is called on a client's thread for each request that has ended. Raises the first error
    of any client, once the others' requests were cancelled and their threads have ended.
    """
    loop = _ClosedLoop(engine, jobs, on_end)
    threads = [
        threading.Thread(target=loop.client, name=f"client-{number}", daemon=True)
        for number in range(num_clients)
    ]
    start = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt, or no thread could be started
        loop.stop(error)
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    seconds = time.perf_counter() - start
    if loop.error is not None:
        raise loop.error
    return LoadRun(tuple(loop.ended[index] for index in range(len(jobs))), seconds)


def measure_load(
    policy: str,
    model: Model,
    driver: Driver,
    config: EngineConfig,
    jobs: Sequence[Job],
    num_clients: int,
    *,
    warm_up: Sequence[Job],
    num_proven: int,
    on_end: OnEnd | None = None,
) -> LoadResult:
    """Measure a load under one of POLICIES on an engine of its own, then prove its bytes.

    `warm_up` runs before and is not measured. The first `num_proven` jobs run once more on another
    engine, with their plans on record: recording waits for the device at each step, so what is
    timed is never what is recorded. Raises the first error of any client.
    """
    with _opened(EngineCore(model, driver, config, POLICIES[policy])) as engine:
        run_load(engine, warm_up, num_clients)
        watch = _Watch(driver.device)
        engine.call(partial(engine.core.log.subscribe, watch))
        run = run_load(engine, jobs, num_clients, on_end)
        seen = engine.call(watch.taken)
        longest_ms = engine.core.longest_capture_beside_stream_ms
    proof, num_replays = prove_load(policy, model, driver, config, jobs[:num_proven], num_clients)
    return LoadResult(
        policy, num_clients, run, seen.tally.counts, seen.capture_ms, seen.num_released_by_decode,
        tuple(seen.refused), longest_ms, proof, num_replays,
    )  # fmt: skip


def prove_load(
    policy: str,
    model: Model,
    driver: Driver,
    config: EngineConfig,
    jobs: Sequence[Job],
    num_clients: int,
) -> tuple[ReplayReport, int]:
    """Record the plans of a load under one of POLICIES and run them again with graphs disabled.

    Compares the logits of every step and all K/V that was written, byte by byte. Also returns how
    many prompt steps replayed in what was recorded: without any, equal bytes say nothing of graphs.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans.jsonl"
        core = EngineCore(model, driver, config, POLICIES[policy])
        recorder = PlanRecorder(path, core)
        core.observer = recorder
        with _opened(core) as engine:
            run_load(engine, jobs, num_clients)
            engine.call(recorder.close)
            num_replays = core.tally.counts[Namespace.PROMPT].replayed
        return replay(path, model, driver), num_replays


@contextmanager
def _opened(core: EngineCore) -> Iterator[Engine]:
    engine = Engine(core)
    try:
        yield engine
    finally:
        engine.close()


class _ClosedLoop:
    """The state that the clients of one load share. `ended` and `error` are read after them."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], on_end: OnEnd | None) -> None:
        self.ended: dict[int, Request] = {}  # by place in the workload
        self.error: BaseException | None = None  # the first
        self._engine = engine
        self._waiting = iter(enumerate(jobs))
        self._open: dict[int, Handle] = {}
        self._on_end = on_end
        self._lock = threading.Lock()

    def client(self) -> None:
        """Send one request after the other until none is left, or one of any client failed."""
        try:
            while (job := self._next()) is not None:
                self._answer(*job)
        except BaseException as error:
            self.stop(error)

    def stop(self, error: BaseException) -> None:
        """Let no client go on: open requests are cancelled, no further one is sent."""
        with self._lock:
            if self.error is None:
                self.error = error
            handles = list(self._open.values())
        for handle in handles:
            handle.cancel()

    def _next(self) -> tuple[int, Job] | None:
        with self._lock:
            return None if self.error is not None else next(self._waiting, None)

    def _answer(self, index: int, job: Job) -> None:
        handle = self._engine.submit(job.prompt_ids, job.params)
        with self._lock:
            self._open[index] = handle
            is_late = self.error is not None  # another client failed meanwhile
        if is_late:
            handle.cancel()
        for _ in handle:
            pass
        with self._lock:
            del self._open[index]
            self.ended[index] = handle.request
        if self._on_end is not None:
            self._on_end(handle.request)


@dataclass(slots=True)
class _Watch:
    """What the event log says from its subscription on. Engine thread only, but for `taken`."""

    device: str
    tally: Tally = field(init=False)
    capture_ms: float = 0.0
    num_released_by_decode: int = 0
    refused: dict[str, None] = field(default_factory=dict)  # in order of appearance

    def __post_init__(self) -> None:
        self.tally = Tally(self.device)

    def __call__(self, event: Event) -> None:
        self.tally(event)
        match event:
            case Seeded():
                self.capture_ms += (event.capture_ns + event.instantiate_ns) / 1e6
            case Released(cause=Cause.DECODE):
                self.num_released_by_decode += event.num_entries
            case Refused():
                self.refused.setdefault(event.reason.value)

    def taken(self) -> "_Watch":
        """A copy of what was seen so far, which later events do not change."""
        copy = replace(self, refused=dict(self.refused))
        copy.tally.counts = {
            namespace: replace(counts, reasons=counts.reasons.copy())
            for namespace, counts in self.tally.counts.items()
        }
        return copy
