"""What Prometheus is told: llama-server's numbers under its names, and graphseed's own.

Owns Meters and the families of both. Numbers of graphs come from the event log, those of requests
from requests that have ended. Does not know HTTP.
"""

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from graphseed.capture.events import (
    Alarm,
    Cause,
    Deferred,
    Direct,
    Event,
    Refused,
    Released,
    Replayed,
    Seeded,
    Stale,
)
from graphseed.capture.identity import Namespace
from graphseed.engine import EngineCore, Request, Status
from graphseed.server.state import Served
from graphseed.server.watch.graph_values import Observation

PREFIX: Final = "llamacpp:"
# Seconds; a replayed prompt takes half a millisecond, a capture of many nodes seconds.
_BUCKETS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip


class Meters:
    """The numbers of one server since it started; engines that sleep and wake add to them.

    `_take` and `observe` run on the engine's thread, everything else on the event loop's.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = _RequestSums()
        self._steps = _StepSums()
        self._of_graphs(self._registry)
        self._of_requests(self._registry)

    def attach(self, served: Served) -> None:
        """Listen to a model's engine from its first request on."""
        core = served.engine.core
        for namespace in Namespace:
            self._bytes.labels(namespace.value).set(0)  # an engine that is new holds nothing
        core.log.subscribe(partial(self._take, weakref.ref(core)))

    def observe(self, observation: Observation) -> None:
        """Take in what a step took. Engine thread."""
        if observation.tokens:
            labels = self._step.labels(observation.namespace.value, observation.kind.value)
            labels.observe(observation.host_ns / 1e9)

    def record(self, request: Request) -> None:
        """Take in a request whose reader has gone: it ended, or was given up."""
        self._requests.add(request)
        self._ended.labels(_end_of(request)).inc()
        at, seen = request.timings, request.observations
        if at.started_ns:
            self._queue.observe((at.started_ns - at.submitted_ns) / 1e9)
        if at.started_ns and at.first_token_ns:
            is_replayed = seen.num_steps == seen.num_replayed > 0
            has_graphs = seen.num_replayed or seen.num_seeded
            label = "replayed" if is_replayed else "partly" if has_graphs else "direct"
            self._prompt.labels(label).observe(at.prompt_ms / 1e3)

    def text(self, served: Served | None) -> str:
        """Everything, in the text format 0.0.4. Begins a new window for the two rates."""
        scheduler = None if served is None else served.engine.core.scheduler
        processing = 0 if scheduler is None else scheduler.num_running
        waiting = 0 if scheduler is None else scheduler.num_waiting
        theirs = _Families([*self._requests.families(), *self._steps.families(processing, waiting)])
        most = self._requests.most_tokens
        # A counter to llama-server, without the ending that the library gives every counter.
        name = f"{PREFIX}n_tokens_max"
        own = (
            f"# HELP {name} Largest number of tokens (prompt and answer) of a request\n"
            f"# TYPE {name} counter\n{name} {float(most)}\n"
        )
        ours = _Families(self._registry.collect())
        return generate_latest(theirs).decode() + own + generate_latest(ours).decode()

    def _of_graphs(self, registry: CollectorRegistry) -> None:
        by = ("namespace",)
        new = partial(Counter, registry=registry)
        self._direct = new(
            "graphseed_direct", "Observations answered by the direct path", (*by, "why")
        )
        self._replayed = new("graphseed_replayed", "Observations answered by a replay", by)
        self._seeded = new("graphseed_seeded", "Graphs captured and instantiated", by)
        self._refused = new("graphseed_refused", "Graphs refused", (*by, "reason"))
        self._released = new("graphseed_released", "Executables given back", (*by, "cause"))
        self._stale = new("graphseed_stale", "Executables that a changed binding made stale", by)
        self._deferred = new("graphseed_deferred", "Releases that waited for prompts", by)
        self._alarms = new("graphseed_alarms", "Alarms: seeds without replays", by)
        self._bytes = Gauge(
            "graphseed_bytes_held", "Bytes that graphs hold; while the model sleeps, held before",
            by, registry=registry,
        )  # fmt: skip
        seconds = partial(Histogram, registry=registry, buckets=_BUCKETS)
        self._capture = seconds("graphseed_capture_seconds", "Time of each capture", by)
        self._instantiate = seconds("graphseed_instantiate_seconds", "Time of each instantiate", by)
        self._step = seconds(
            "graphseed_step_host_seconds",
            "Time of each step on the host, without captures: on a GPU until it is submitted",
            (*by, "answered"),
        )
        for namespace in Namespace:  # there from the first scrape on
            for family in (
                self._replayed, self._seeded, self._stale, self._deferred, self._alarms,
                self._bytes, self._capture, self._instantiate,
            ):  # fmt: skip
                family.labels(namespace.value)

    def _of_requests(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "graphseed_requests", "Requests that ended, by how", ("end",), registry=registry
        )
        seconds = partial(Histogram, registry=registry, buckets=_BUCKETS)
        self._queue = seconds("graphseed_queue_seconds", "Wait of each request before its prompt")
        self._prompt = seconds(
            "graphseed_prompt_seconds",
            "First chunk to first token of each request; replayed: by replays alone",
            ("answered",),
        )
        for label in ("direct", "partly", "replayed"):
            self._prompt.labels(label)

    def _take(self, core: "weakref.ref[EngineCore]", event: Event) -> None:
        name = event.namespace.value
        match event:
            case Direct():
                self._direct.labels(name, event.why.value).inc()
                self._steps.add(core())
            case Replayed():
                self._replayed.labels(name).inc()
                self._steps.add(core())
            case Seeded():
                self._seeded.labels(name).inc()
                self._bytes.labels(name).inc(event.num_bytes)
                self._capture.labels(name).observe(event.capture_ns / 1e9)
                self._instantiate.labels(name).observe(event.instantiate_ns / 1e9)
            case Refused():
                self._refused.labels(name, event.reason.value).inc()
            # While the model sleeps, what was so before is told, as by llama-server.
            case Released() if event.cause is not Cause.SHUTDOWN:
                self._released.labels(name, event.cause.value).inc(event.num_entries)
                self._bytes.labels(name).dec(event.bytes_held)
            case Stale():
                self._stale.labels(name).inc(event.num_entries)
            case Deferred():
                self._deferred.labels(name).inc()
            case Alarm():
                self._alarms.labels(name).inc()


class _Families:
    """Families as the library writes them, without the times at which they were made."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The families, one by one."""
        for family in self._families:
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class _RequestSums:
    """llama-server's sums over requests. Event loop's thread only."""

    def __init__(self) -> None:
        self.most_tokens = 0
        self._prompt_tokens = self._cached_tokens = self._new_tokens = 0
        self._prompt_seconds = self._new_seconds = 0.0
        self._prompt_rate = _Rate()
        self._new_rate = _Rate()

    def add(self, request: Request) -> None:
        """Add a request as its timings tell it; a prompt that was given up halfway is not told."""
        at, num_new = request.timings, len(request.output_ids)
        self.most_tokens = max(self.most_tokens, request.num_tokens)
        prompt_end_ns = at.first_token_ns or at.finished_ns
        is_whole = request.status is not Status.FAILED or at.first_token_ns
        if not at.started_ns or not prompt_end_ns or not is_whole:
            return
        num_prompt = len(request.prompt_ids) - request.num_cached
        seconds = (prompt_end_ns - at.started_ns) / 1e9
        self._prompt_tokens += num_prompt
        self._cached_tokens += request.num_cached
        self._prompt_seconds += seconds
        self._prompt_rate.add(num_prompt, seconds)
        if at.first_token_ns:
            seconds = ((at.finished_ns or time.perf_counter_ns()) - at.first_token_ns) / 1e9
            self._new_seconds += seconds
            self._new_rate.add(num_new - 1, seconds)  # the first token is the prompt's
        self._new_tokens += num_new

    def families(self) -> Iterator[Metric]:
        """Families in llama-server's names; the rates are of the time since the last call."""
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed, without cached ones", self._prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens reused", self._cached_tokens),
            ("prompt_seconds", "Time of prompts", self._prompt_seconds),
            ("tokens_predicted", "Tokens generated", self._new_tokens),
            ("tokens_predicted_seconds", "Time of generation", self._new_seconds),
            # Nothing is drafted here.
            ("spec_decode_num_draft_tokens", "Tokens drafted", 0),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted", 0),
            ("spec_decode_num_drafts", "Steps that verified a draft", 0),
        ):
            yield CounterMetricFamily(f"{PREFIX}{name}", text, value)
        for name, text, rate in (
            ("prompt_tokens_seconds", "Prompt tokens a second", self._prompt_rate),
            ("predicted_tokens_seconds", "Generated tokens a second", self._new_rate),
        ):
            yield GaugeMetricFamily(f"{PREFIX}{name}", f"{text}, since last asked", rate.taken())


class _StepSums:
    """Steps and how many slots were busy in them. Added to on the engine's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_steps = 0
        self._num_busy = 0

    def add(self, core: EngineCore | None) -> None:
        """One step."""
        with self._lock:
            self._num_steps += 1
            self._num_busy += 0 if core is None else core.scheduler.num_running

    def families(self, processing: int, waiting: int) -> Iterator[Metric]:
        """Families in llama-server's names."""
        with self._lock:
            num_steps, num_busy = self._num_steps, self._num_busy
        yield CounterMetricFamily(f"{PREFIX}n_decode", "Steps, of prompts and decode", num_steps)
        for name, text, value in (
            ("requests_processing", "Requests that have a slot", processing),
            ("requests_deferred", "Requests that wait for a slot", waiting),
            ("n_busy_slots_per_decode", "Busy slots in a step", num_busy / max(1, num_steps)),
        ):
            yield GaugeMetricFamily(f"{PREFIX}{name}", text, value)


class _Rate:
    """Tokens a second since the last time it was asked."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add what took so long."""
        self._num_tokens += num_tokens
        self._seconds += seconds

    def taken(self) -> float:
        """The rate; a new window begins."""
        rate = self._num_tokens / self._seconds if self._seconds > 0 else 0.0
        self._num_tokens, self._seconds = 0, 0.0
        return rate


def _end_of(request: Request) -> str:
    if request.finish_reason is not None:
        return request.finish_reason.value
    if request.status is Status.FINISHED:
        return "embedding"
    return "failed" if request.status is Status.FAILED else "given up"
