"""What the engine adds to the bare step: one client's first token against its prompt step.

Owns FirstToken and StepMarks. The step is timed twice: in the very prompt, by marks on the device's
clock between which nothing is staged, and by itself, staged and run and waited for as `bench` does
it, in turn with the prompts. Compares no policies and prints nothing.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from graphseed.capture.driver import Driver, Mark
from graphseed.capture.identity import Namespace
from graphseed.engine import Engine, EngineConfig, EngineCore, SamplingParams
from graphseed.engine.blocks import BlockTable
from graphseed.engine.plan import SequencePart, StepPlan
from graphseed.measure.policies import POLICIES
from graphseed.models.model import Model

NUM_WARM_UP: Final = 3
SETTLE_SECONDS: Final = 0.05  # after a warm-up prompt: what `resident` observed is captured then
SEED: Final = 5


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Medians over the prompts of one policy."""

    ttft_ms: float  # from the call of Engine.stream to the first token in the reader's hands
    step_ms: float  # of the same prompts: from a staged step to the end of its work on the device
    added_ms: float  # of each prompt's difference: queue, staging, sampling, the way to the reader
    bare_ms: float  # of a step by itself on the engine's thread: staged, run and waited for
    added_to_bare_ms: float  # of each prompt's difference to the bare step after it
    hit_rate: float  # share of these prompts whose step replayed: no median


class StepMarks:
    """Marks each prompt step on the device's clock, and waits for nothing. An observer."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._before: Mark | None = None
        self._last: tuple[Mark, Mark] | None = None

    def before(self, plan: StepPlan) -> None:
        """Mark a step that is staged and not submitted: with one client, the device is idle."""
        self._before = self._driver.mark(timed=True)

    def after(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Mark the end of what was submitted."""
        if self._before is not None and plan.namespace is Namespace.PROMPT:
            self._last = (self._before, self._driver.mark(timed=True))

    def last_ms(self) -> float:
        """Milliseconds of the last prompt step, once it is done."""
        if self._last is None:
            raise RuntimeError("no prompt step was seen")
        before, after = self._last
        after.wait()
        return after.ms_since(before)


def measure_first_token(
    policy: str,
    model: Model,
    driver: Driver,
    *,
    num_rounds: int,
    token_ids: Sequence[int],
    prompt_len: int = 512,
    rest_seconds: float = 0.0,
) -> FirstToken:
    """Answer one-chunk prompts of fresh random tokens one by one under one of POLICIES.

    The client asks again `rest_seconds` after its answer: 0 is a closed loop, and after a rest the
    host's threads and caches are cold.
    """
    config = EngineConfig(context_len=2 * prompt_len, num_ubatch=prompt_len, reuses_prefixes=False)
    rng, marks = random.Random(SEED), StepMarks(driver)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    ttft_ms: list[float] = []
    step_ms: list[float] = []
    num_replayed = 0
    bare_ms: list[float] = []
    core = EngineCore(model, driver, config, POLICIES[policy])
    core.observer = marks
    with Engine(core) as engine:
        for number in range(NUM_WARM_UP + num_rounds):
            prompt = rng.choices(token_ids, k=prompt_len)
            start_ns = time.perf_counter_ns()
            stream = engine.stream(prompt, params)
            next(stream)
            end_ns = time.perf_counter_ns()
            stream.close()
            if number < NUM_WARM_UP:
                time.sleep(SETTLE_SECONDS)
                continue
            ttft_ms.append((end_ns - start_ns) / 1e6)
            step_ms.append(engine.call(marks.last_ms))
            num_replayed += stream.request.observations.num_replayed
            prompt = rng.choices(token_ids, k=prompt_len)
            bare_ms.append(engine.call(partial(_bare_step_ms, core, prompt)))
            time.sleep(rest_seconds)
    added_ms = [ttft - step for ttft, step in zip(ttft_ms, step_ms, strict=True)]
    added_to_bare_ms = [ttft - bare for ttft, bare in zip(ttft_ms, bare_ms, strict=True)]
    return FirstToken(
        ttft_ms=statistics.median(ttft_ms),
        step_ms=statistics.median(step_ms),
        added_ms=statistics.median(added_ms),
        bare_ms=statistics.median(bare_ms),
        added_to_bare_ms=statistics.median(added_to_bare_ms),
        hit_rate=num_replayed / num_rounds,
    )


def _bare_step_ms(core: EngineCore, prompt: Sequence[int]) -> float:
    """One prompt step without a request, on the engine's thread."""
    table = BlockTable(core.pool, core.config.max_blocks)
    try:
        table.grow(len(prompt))
        part = SequencePart(np.asarray(prompt, dtype=np.int32), 0, table)
        plan = StepPlan(Namespace.PROMPT, core.config.num_ubatch, (part,))
        core.driver.synchronize()
        start_ns = time.perf_counter_ns()
        core.runner.run(plan)
        core.driver.synchronize()
        return (time.perf_counter_ns() - start_ns) / 1e6
    finally:
        table.close()
