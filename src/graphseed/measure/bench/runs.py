"""llama-bench's tests on this engine, the policies side by side in one process.

Owns how a row comes about. In each repetition every
policy runs the same fresh random tokens in turn, so that what drifts hits all alike. A repetition
is timed on the device's clock; the context before it (`depth_len`) is not. The host waits once
behind a prompt and at each decoded token; nothing is sampled. After the timed repetitions, two
more are digested under each policy, the tokens of each fresh too: a replay that wrote nothing would
leave what the repetition before it wrote. Does not parse or print.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

import numpy as np

from graphseed.capture.driver import Driver
from graphseed.capture.identity import Namespace
from graphseed.engine.errors import DeviceMemoryError
from graphseed.engine.kv import is_out_of_memory
from graphseed.measure.bench.ceiling import Ceiling, StepCost
from graphseed.measure.bench.clock import laps_ms
from graphseed.measure.bench.grid import SHORT_DECODE_LEN, BenchTest
from graphseed.measure.bench.lane import Lane, StepDigest, TokenIds
from graphseed.measure.bench.rows import BenchRow, Digest, PolicyFigures
from graphseed.models.model import Model

NUM_PROOFS: Final = 2  # digested repetitions: the second is a replay wherever one can be

# Parts of the key that draws a repetition's tokens; repetitions count from 0, the warm-up.
_DEPTH: Final = 1_000_000
_SHORT: Final = 2_000_000
_PROOF: Final = 3_000_000


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How every row is measured."""

    policies: tuple[str, ...]  # in the order in which they run; the baseline among them
    num_repetitions: int = 5
    warms_up: bool = True  # whether a first repetition is left out, in which graphs are seeded
    seed: int = 0  # of the random tokens


def num_runs(test: BenchTest, settings: BenchSettings, needs_decode: bool) -> int:
    """Repetitions that `measure_test` runs, over all policies: how often it ticks."""
    num = settings.warms_up + settings.num_repetitions + NUM_PROOFS
    if needs_decode:
        num += 1 + settings.num_repetitions
    return num * len(settings.policies)


def measure_test(
    model: Model,
    drivers: Mapping[str, Driver],
    test: BenchTest,
    settings: BenchSettings,
    ceiling: Ceiling,
    *,
    needs_decode: bool,
    tick: Callable[[], None] = lambda: None,
) -> BenchRow:
    """Measure one row.

    `drivers` has one for each policy: graphs of one policy are then released without touching the
    streams of another. `needs_decode` measures a short decode behind a prompt row. Policies share
    the device; where its memory does not hold them all, they run one after another. Raises
    DeviceMemoryError when it does not hold one.
    """
    started = datetime.now(UTC)
    plan = _Row(model, drivers, test, settings, needs_decode, tick)
    groups = [[name] for name in settings.policies]
    figures = plan.measure(settings.policies) if len(groups) > 1 else None
    is_side_by_side = figures is not None or len(groups) == 1
    if figures is None:
        figures = {}
        for names in groups:
            figures |= plan.measure_alone(names[0])
    dtype = str(model.dtype).removeprefix("torch.")
    return BenchRow(
        test, started, figures,
        floor_ms=StepCost.of(model).floor_ms(ceiling, dtype, test.timed_steps()),
        decode_of=f"tg{SHORT_DECODE_LEN} after the prompt" if needs_decode else test.name,
        is_side_by_side=is_side_by_side,
    )  # fmt: skip


class _TooLittleMemory(Exception):
    """The device does not hold all policies at once."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One row in the making."""

    model: Model
    drivers: Mapping[str, Driver]
    test: BenchTest
    settings: BenchSettings
    needs_decode: bool
    tick: Callable[[], None]

    def measure(self, names: Sequence[str]) -> dict[str, PolicyFigures] | None:
        """Figures of policies that are measured side by side; None when memory is too small."""
        try:
            return self._measure(names)
        except (DeviceMemoryError, _TooLittleMemory):
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def measure_alone(self, name: str) -> dict[str, PolicyFigures]:
        """Figures of one policy that has the device to itself. Raises DeviceMemoryError."""
        try:
            return self._measure([name])
        except DeviceMemoryError:
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        raise DeviceMemoryError(
            f"test {self.test.name}", None, self.drivers[name].free_bytes(),
            "lower -p, -n, -d, -ub or -np",
        )  # fmt: skip

    def _measure(self, names: Sequence[str]) -> dict[str, PolicyFigures]:
        with ExitStack() as stack:
            lanes = [
                stack.enter_context(Lane(name, self.model, self.drivers[name], self.test))
                for name in names
            ]
            depth_ids = self._tokens(self.test.depth_len, _DEPTH)
            for lane in lanes:
                lane.ready(depth_ids)
            if self.settings.warms_up:
                self._repeat(lanes, 0)
            before = [lane.counts(self._hit_namespace) for lane in lanes]
            laps = [self._repeat(lanes, n + 1) for n in range(self.settings.num_repetitions)]
            after = [lane.counts(self._hit_namespace) for lane in lanes]
            if len(lanes) > 1 and any(lane.watch.lacked_memory for lane in lanes):
                raise _TooLittleMemory
            decodes = self._short_decodes(lanes) if self.needs_decode else []
            digests = [self._prove(lane) for lane in lanes]
            return {
                lane.policy: self._figures(
                    lane,
                    [lap[i] for lap in laps],
                    tuple(decode[i] for decode in decodes),
                    _share(before[i], after[i]),
                    digests[i],
                )
                for i, lane in enumerate(lanes)
            }

    def _repeat(self, lanes: Sequence[Lane], number: int) -> list[tuple[float, ...]]:
        """One repetition under every policy: milliseconds of prompt and decode, where timed."""
        prompt_ids, new_ids = self._prompt_and_new(number)
        laps: list[tuple[float, ...]] = []
        for lane in lanes:
            lane.rewind(self.test.depth_len)
            works = [partial(lane.prompt, prompt_ids)] if prompt_ids.size else []
            works += [partial(lane.decode, new_ids)] if new_ids.size else []
            laps.append(laps_ms(lane.driver, *works))
            lane.settle()
            self.tick()
        return laps

    def _short_decodes(self, lanes: Sequence[Lane]) -> list[list[float]]:
        """Milliseconds of a short decode behind the prompt, by repetition and policy."""
        start = self.test.depth_len + self.test.prompt_len
        decodes = []
        for number in range(self.settings.num_repetitions + 1):
            token_ids = self._tokens(SHORT_DECODE_LEN, _SHORT + number)
            laps: list[float] = []
            for lane in lanes:
                lane.rewind(start)
                laps += laps_ms(lane.driver, partial(lane.decode, token_ids))
                lane.settle()
                self.tick()
            decodes.append(laps)
        return decodes[1:]  # the first seeds

    def _prove(self, lane: Lane) -> tuple[Digest, ...]:
        """Digests of repetitions whose tokens are fresh, and the same under every policy."""
        digests = []
        for number in range(NUM_PROOFS):
            prompt_ids, new_ids = self._prompt_and_new(_PROOF + number)
            lane.rewind(self.test.depth_len)
            observer = StepDigest()
            if prompt_ids.size:
                lane.prompt(prompt_ids, observer)
            if new_ids.size:
                lane.decode(new_ids, observer)
            digests.append((observer.hexdigest(), lane.kv_digest(self.test.depth_len)))
            lane.settle()
            self.tick()
        return tuple(digests)

    def _figures(
        self,
        lane: Lane,
        laps: Sequence[tuple[float, ...]],
        decodes: tuple[float, ...],
        hit_rate: float,
        digests: tuple[Digest, ...],
    ) -> PolicyFigures:
        test, watch = self.test, lane.watch
        prompt_ms = tuple(lap[0] for lap in laps) if test.prompt_len else ()
        namespaces = [Namespace.PROMPT] if test.prompt_len else []
        namespaces += [Namespace.DECODE] if test.new_len else []
        refusals = [f"{e.namespace.value} graph: {e.reason.value} ({e.detail})"
                    for e in watch.refusals]  # fmt: skip
        return PolicyFigures(
            policy=lane.policy,
            num_tokens=test.num_tokens,
            prompt_ms=prompt_ms,
            decode_ms=tuple(lap[-1] for lap in laps) if test.new_len else decodes,
            hit_rate=hit_rate,
            num_seeds=watch.num_seeds(namespaces),
            capture_ms=watch.capture_ms(namespaces),
            instantiate_ms=watch.instantiate_ms(namespaces),
            num_bytes=watch.most_bytes(namespaces),
            refusals=tuple(dict.fromkeys(refusals)),
            digests=digests,
            is_decode_own=bool(test.new_len),
        )

    @property
    def _hit_namespace(self) -> Namespace:
        return Namespace.PROMPT if self.test.prompt_len else Namespace.DECODE

    def _prompt_and_new(self, number: int) -> tuple[TokenIds, TokenIds]:
        both = self._tokens(self.test.prompt_len + self.test.new_len, number)
        return both[:, : self.test.prompt_len], both[:, self.test.prompt_len :]

    def _tokens(self, length: int, number: int) -> TokenIds:
        """Random ids, [S, length]: fresh for each number, equal for equal ones."""
        test = self.test
        key = (self.settings.seed, test.prompt_len, test.new_len, test.depth_len, number)
        shape = (test.num_parallel, length)
        return np.random.default_rng(key).integers(0, self.model.vocab_size, shape, dtype=np.int32)


def _share(before: tuple[int, int], after: tuple[int, int]) -> float:
    candidates, replayed = after[0] - before[0], after[1] - before[1]
    return replayed / candidates if candidates else 0.0
