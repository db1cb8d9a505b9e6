"""Prompts through Engine.stream in this process, as a program without a server would send them.

Owns the engine for as long as a benchmark needs it, and what one answer took (Streamed).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from graphseed.capture import Driver
from graphseed.engine import Engine, EngineConfig, EngineCore, SamplingParams
from graphseed.measure.policies import POLICIES
from graphseed.models import Model


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer."""

    ttft_ms: float  # from the prompt to the first token in the reader's hands
    engine_ms: float  # of these, what the engine says was queue and prompt
    token_ids: tuple[int, ...]


class Direct:
    """One client of an engine."""

    def __init__(self, engine: Engine, model: Model, num_new: int) -> None:
        self._engine, self._model = engine, model
        # As the server understands ignore_eos: an end of sequence is not even sampled.
        biases = tuple((token_id, -inf) for token_id in sorted(model.eos_ids))
        self._params = SamplingParams(max_tokens=num_new, ignore_eos=True, logit_bias=biases)

    def ask(self, prompt: str | list[int]) -> Streamed:
        """Answer a prompt to its end. A text is made tokens first, within the time taken."""
        start_ns = time.perf_counter_ns()
        ids = self._model.encode(prompt) if isinstance(prompt, str) else prompt
        stream = self._engine.stream(ids, self._params)
        first = next(stream)
        ttft_ms = (time.perf_counter_ns() - start_ns) / 1e6
        token_ids = tuple(
            delta.token_id for delta in (first, *stream) if delta.token_id is not None
        )
        timings = stream.request.timings
        engine_ms = (timings.first_token_ns - timings.submitted_ns) / 1e6
        return Streamed(ttft_ms, engine_ms, token_ids)


@contextmanager
def streaming(
    policy: str, model: Model, driver: Driver, config: EngineConfig, num_new: int
) -> Iterator[Direct]:
    """Open an engine under one of POLICIES, and close it."""
    with Engine(EngineCore(model, driver, config, POLICIES[policy])) as engine:
        yield Direct(engine, model, num_new)
