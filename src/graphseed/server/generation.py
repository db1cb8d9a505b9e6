"""One prompt through the engine, as a server wants it: pieces while it runs, a result at the end.

Owns GenerateOptions, Piece, Result and Generation. Every endpoint that generates goes through here,
so that limits, cancellation, deadlines and timings are the same for all. Does not know any wire
format.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from graphseed.engine import AsyncHandle, Engine, FinishReason, Grammar, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What a request asks for besides sampling."""

    params: SamplingParams
    grammar: Grammar | None = None
    seconds: float | None = None  # deadline of the whole request
    max_predict_ms: float = 0.0  # t_max_predict_ms, from the first token on; 0: no limit
    caches_prompt: bool = True
    slot: int | None = None  # id_slot; None: any
    reports_progress: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of the engine brought."""

    text: str = ""
    token_id: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # token ids and log-probabilities, best first
    num_prompt_done: int | None = None  # a progress report, and nothing else


class Generation:
    """One request and its pieces. Iterate once; leaving early cancels the request.

    `request` is the engine's own, and has timings, counts and the finish reason when all is read.
    """

    def __init__(self, engine: Engine, prompt_ids: Iterable[int], options: GenerateOptions) -> None:
        """Check the request. Raises RequestError before anything runs."""
        self._engine = engine
        self._options = options
        self.request: Request = engine.core.request(prompt_ids, options.params, options.grammar)
        self.request.reuses_prefix = options.caches_prompt
        self.request.wanted_slot = options.slot
        self.request.reports_progress = options.reports_progress
        if options.seconds is not None:
            self.request.set_deadline(options.seconds)
        self.was_out_of_time = False  # ended by max_predict_ms
        self._deltas: AsyncHandle | None = None  # once it is handed in

    def begin(self) -> asyncio.Future[None]:
        """Hand it in now, and read it later: there is something to read when the future is done.

        Raises BadParameter, QueueFull, Closed.
        """
        self._deltas = self._engine.aread(self.request)
        return self._deltas.has_news

    def close(self) -> None:
        """Give it up, if it was begun and has not ended."""
        if self._deltas is not None:
            self._deltas.close()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces as they come; begins what is not begun. Raises as that, and what ends it."""
        async with aclosing(self._deltas or self._engine.aread(self.request)) as deltas:
            async for delta in deltas:
                sampled = delta.sampled
                yield Piece(
                    delta.text,
                    delta.token_id,
                    None if sampled is None else sampled.logprob,
                    () if sampled is None else sampled.top,
                    delta.num_prompt_done,
                )
                if not delta.is_last and self._is_out_of_time():
                    self.was_out_of_time = True
                    return

    async def read(self) -> list[Piece]:
        """Every piece, once the request is finished."""
        return [piece async for piece in self.pieces()]

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended. Only when all is read."""
        return self.request.finish_reason or FinishReason.MAX_TOKENS

    @property
    def timings(self) -> dict[str, Any]:
        """llama-server's timings, and what this request saw of queue and prompt graphs.

        May be read while it runs; nothing in it is ever null or infinite.
        """
        request, at = self.request, self.request.timings
        now = time.perf_counter_ns()
        prompt_end = at.first_token_ns or at.finished_ns or now
        prompt_ms = (prompt_end - at.started_ns) / 1e6 if at.started_ns else 0.0
        decode_end = at.finished_ns or now
        decode_ms = (decode_end - at.first_token_ns) / 1e6 if at.first_token_ns else 0.0
        num_prompt = len(request.prompt_ids) - request.num_cached
        num_steps = max(0, len(request.output_ids) - 1)  # the first token is the prompt's
        queue_end = at.started_ns or now
        seen = request.observations
        return {
            "cache_n": request.num_cached,
            "prompt_n": num_prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / num_prompt,
            "prompt_per_second": 1e3 * num_prompt / prompt_ms if prompt_ms else 0.0,
            "predicted_n": len(request.output_ids),
            "predicted_ms": decode_ms,
            "predicted_per_token_ms": decode_ms / num_steps if num_steps else 0.0,
            "predicted_per_second": 1e3 * num_steps / decode_ms if num_steps and decode_ms else 0.0,
            "queue_ms": (queue_end - at.submitted_ns) / 1e6,
            "prompt_observations": seen.num_steps,
            "prompt_seeded": seen.num_seeded,
            "prompt_replayed": seen.num_replayed,
        }

    def _is_out_of_time(self) -> bool:
        limit, start_ns = self._options.max_predict_ms, self.request.timings.first_token_ns
        return bool(limit and start_ns and (time.perf_counter_ns() - start_ns) / 1e6 >= limit)
