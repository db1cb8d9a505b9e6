"""What the demo measures: one policy, the same prompt twice.

Owns PolicyRun and PassRun, values that hold figures and digests alone. Does not print.
"""

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graphseed.capture import Driver, Event, GraphIdentity, LogLines, Namespace, Selection
from graphseed.capture.events import Alarm, Direct, Refused, Released, Replayed, Seeded
from graphseed.engine import Delta, EngineConfig, EngineCore, SamplingParams
from graphseed.engine.step import StepTrace
from graphseed.models.model import Model

NUM_PASSES = 2


@dataclass(frozen=True, slots=True)
class PassRun:
    """One pass of the prompt under one policy."""

    prompt_ms: float  # first chunk staged to first token on the host
    decode_ms: float  # first token to last
    num_prompt_tokens: int
    num_new_tokens: int
    prompt_steps_ms: tuple[float, ...]
    decode_steps_ms: tuple[float, ...]
    how: tuple[str, ...]  # of each prompt observation: "direct" or "replayed"
    logits_sha256: str  # of the read logits of every step
    kv_sha256: str  # of all valid written KV rows
    text: str

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return 1e3 * self.num_prompt_tokens / self.prompt_ms

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first; 0 where there is only one."""
        return 1e3 * (self.num_new_tokens - 1) / self.decode_ms if self.num_new_tokens > 1 else 0.0


@dataclass(slots=True)
class IdentityRow:
    """What happened to one identity over both passes."""

    identity: GraphIdentity
    num_nodes: int = 0
    num_bytes: int = 0
    capture_ms: float = 0.0
    instantiate_ms: float = 0.0
    num_seeded: int = 0
    num_replayed: int = 0
    num_direct: int = 0
    was_seen_again_while_held: bool = False
    _is_held: bool = False


@dataclass(slots=True)
class PolicyRun:
    """Both passes of one policy, its counters, and what happened to each identity."""

    name: str
    passes: list[PassRun] = field(default_factory=list)
    rows: dict[GraphIdentity, IdentityRow] = field(default_factory=dict)
    summary: tuple[str, ...] = ()
    released: list[Released] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    how: list[str] = field(default_factory=list)  # each prompt observation: direct or replayed

    def __call__(self, event: Event) -> None:
        match event:
            case Seeded():
                row = self._row(event.identity)
                row.num_nodes, row.num_bytes = event.num_nodes, event.num_bytes
                row.capture_ms = event.capture_ns / 1e6
                row.instantiate_ms = event.instantiate_ns / 1e6
                row.num_seeded += 1
                row._is_held = True
            case Replayed():
                row = self._row(event.identity)
                row.num_replayed += 1
                row.was_seen_again_while_held = True
                self._note(event, "replayed")
            case Direct():
                row = self._row(event.identity)
                row.was_seen_again_while_held |= row._is_held and row.num_direct >= row.num_seeded
                row.num_direct += 1
                self._note(event, "direct")
            case Released():
                for row in self.rows.values():
                    if row.identity.namespace is event.namespace:
                        row._is_held = False
                self.released.append(event)
            case Refused():
                self.refused.append(event)
            case Alarm():
                self.alarms.append(event.message)

    @property
    def digests(self) -> set[tuple[str, str]]:
        """Distinct (logits, KV) digests over the passes: one where all bytes are equal."""
        return {(run.logits_sha256, run.kv_sha256) for run in self.passes}

    def step_ms(self, how: str) -> list[tuple[int, float]]:
        """Number in its prompt, and milliseconds, of each prompt observation answered so."""
        return [
            (number, ms)
            for run in self.passes
            for number, (ms, answered) in enumerate(zip(run.prompt_steps_ms, run.how, strict=True))
            if answered == how
        ]

    def decode_step_ms(self) -> float | None:
        """Median milliseconds of a decode step, the first (which seeds) left out."""
        steps = [ms for run in self.passes for ms in run.decode_steps_ms[1:]]
        return statistics.median(steps) if steps else None

    def _note(self, event: Event, how: str) -> None:
        if event.namespace is Namespace.PROMPT:
            self.how.append(how)

    def _row(self, identity: GraphIdentity) -> IdentityRow:
        return self.rows.setdefault(identity, IdentityRow(identity))


def measure_policy(
    name: str,
    selection: Selection,
    model: Model,
    driver: Driver,
    config: EngineConfig,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    show: Callable[[Delta], None] | None,
) -> PolicyRun:
    """Run the prompt twice on a fresh engine under one policy."""
    run = PolicyRun(name)
    engine = EngineCore(model, driver, config, selection)
    engine.log.subscribe(run)
    engine.log.subscribe(LogLines())
    try:
        engine.warm_up()
        for number in range(NUM_PASSES):
            run.passes.append(
                _measure_pass(engine, prompt_ids, params, run, show if number == 0 else None)
            )
        lines, no_effect = engine.finish()
        run.summary = (*lines, *([no_effect] if no_effect else []))
        run.counts = {
            namespace.value: {
                name: getattr(engine.tally.counts[namespace], name)
                for name in ("candidates", "seeded", "replayed", "direct", "refused", "released",
                             "deferred", "stale")
            }
            for namespace in Namespace
        }  # fmt: skip
    finally:
        engine.close()
    return run


def _measure_pass(
    engine: EngineCore,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    run: PolicyRun,
    show: Callable[[Delta], None] | None,
) -> PassRun:
    trace, text, last = StepTrace(engine.driver), "", None
    num_before = len(run.how)
    for delta in engine.stream(prompt_ids, params, observer=trace, kv_digest=True):
        text += delta.text
        last = delta
        if show is not None:
            show(delta)
    engine.driver.synchronize()
    if last is None or last.kv_digest is None:
        raise RuntimeError("the stream ended without a last token")
    sha = hashlib.sha256()
    for logits in trace.logits:
        sha.update(logits.cpu().numpy().tobytes())
    timings = last.request.timings
    return PassRun(
        prompt_ms=timings.prompt_ms,
        decode_ms=timings.decode_ms,
        num_prompt_tokens=len(prompt_ids),
        num_new_tokens=len(last.request.output_ids),
        prompt_steps_ms=tuple(trace.step_ms(Namespace.PROMPT)),
        decode_steps_ms=tuple(trace.step_ms(Namespace.DECODE)),
        how=tuple(run.how[num_before:]),
        logits_sha256=sha.hexdigest(),
        kv_sha256=last.kv_digest,
        text=text,
    )


def paired_step_ms(direct: PolicyRun, replayed: PolicyRun) -> tuple[float, float] | None:
    """Median milliseconds of a direct and a replayed observation of the same chunks.

    Later chunks attend to more, so only observations at one place of the prompt are compared.
    None where nothing was replayed.
    """
    by_number: dict[int, list[float]] = {}
    for number, ms in direct.step_ms("direct"):
        by_number.setdefault(number, []).append(ms)
    pairs = [
        (statistics.median(by_number[number]), ms)
        for number, ms in replayed.step_ms("replayed")
        if number in by_number
    ]
    if not pairs:
        return None
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
