"""Plans instead of requests: a model under one policy, fed as a measurement wants it.

Owns Session (an engine core whose steps are chosen by the caller) and Slot (one sequence's blocks
and tokens). It cuts prompts, pads batches and settles as the engine does, without a queue, sampling
or text. Does not time, compare or print.
"""

# T rows of a step, S sequences, V vocabulary

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np
import torch

from graphseed.capture.driver import Driver
from graphseed.capture.identity import Namespace
from graphseed.capture.selector import Selection
from graphseed.engine.blocks import BlockTable
from graphseed.engine.chunks import capacity_of, plan_chunks
from graphseed.engine.config import EngineConfig
from graphseed.engine.core import EngineCore
from graphseed.engine.plan import SequencePart, StepPlan
from graphseed.engine.step import StepObserver
from graphseed.models.model import Model


class Slot(AbstractContextManager["Slot"]):
    """One sequence: the tokens planned so far and the blocks that hold their K/V.

    Owned by whoever asked the session for it, and closed by them, before the session.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.table = BlockTable(session.core.pool, session.core.config.max_blocks)
        self.num_tokens = 0  # planned so far: the position of the next one

    def part(self, token_ids: Sequence[int]) -> SequencePart:
        """The next tokens as a part of a step. Raises OutOfBlocks."""
        start = self.num_tokens
        self.table.grow(start + len(token_ids))
        self.num_tokens += len(token_ids)
        return SequencePart(np.asarray(token_ids, dtype=np.int32), start, self.table)

    def prompt(self, token_ids: Sequence[int]) -> tuple[StepPlan, ...]:
        """The next tokens as a prompt's chunks: full ones, then the padded tail."""
        num_ubatch, first = self._session.core.config.num_ubatch, self.num_tokens
        plans = []
        for chunk in plan_chunks(first + len(token_ids), num_ubatch, first):
            part = self.part(token_ids[chunk.start - first : chunk.end - first])
            plans.append(StepPlan(Namespace.PROMPT, chunk.capacity, (part,)))
        return tuple(plans)

    def rewind(self, num_tokens: int = 0) -> None:
        """Plan again from a position on: what was written behind it is written over."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"{num_tokens} of {self.num_tokens} planned tokens cannot be kept")
        self.num_tokens = num_tokens

    def kv_indices(self) -> torch.Tensor:
        """Rows of KV memory that hold the planned tokens, [num_tokens] int32."""
        return torch.from_numpy(self.table.kv_indices(0, self.num_tokens))

    def close(self) -> None:
        """Give the blocks back. May be called twice."""
        self.table.close()
        self.num_tokens = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Session(AbstractContextManager["Session"]):
    """An engine core under one policy. One thread; closed by its owner.

    `core` is there for its cache, tally, event log and KV memory; its requests are not used.
    """

    def __init__(
        self, model: Model, driver: Driver, config: EngineConfig, selection: Selection
    ) -> None:
        self.core = EngineCore(model, driver, config, selection)

    def slot(self) -> Slot:
        """A place for one sequence."""
        return Slot(self)

    def packed(self, parts: Sequence[SequencePart]) -> StepPlan:
        """Whole chunks of several prompts in one step. Raises BadParameter when they do not fit."""
        num_rows = sum(len(part.token_ids) for part in parts)
        capacity = capacity_of(num_rows, self.core.config.num_ubatch)
        return StepPlan(Namespace.PROMPT, capacity, tuple(parts), self._rung(len(parts)))

    def decode(self, parts: Sequence[SequencePart]) -> StepPlan:
        """One token of each of several sequences, padded to the engine's rung of batch sizes."""
        rung = self._rung(len(parts))
        return StepPlan(Namespace.DECODE, rung, tuple(parts), rung)

    def run(self, plan: StepPlan, observer: StepObserver | None = None) -> torch.Tensor:
        """Run one step through the cache: logits [S, V] float32, valid until the next step."""
        return self.core.runner.run(plan, observer)

    def run_prompt(
        self, plans: Iterable[StepPlan], observer: StepObserver | None = None
    ) -> torch.Tensor:
        """Run a prompt's chunks as the engine does where nothing else runs.

        Under `seed` the prompt counts as unfinished until its last chunk is submitted; under
        `resident` what was observed is captured behind the chunks of which more follow. Returns the
        logits of the last chunk. What waits for an idle moment is left to `settle`.
        """
        cache, logits, plans = self.core.cache, None, tuple(plans)
        cache.num_unfinished_prompts = 1
        try:
            for number, plan in enumerate(plans, 1):
                logits = self.run(plan, observer)
                if number < len(plans):
                    cache.settle(1)
        finally:
            cache.num_unfinished_prompts = 0
        if logits is None:
            raise ValueError("a prompt has at least one chunk")
        return logits

    def settle(self) -> None:
        """Be idle: wait for the device, and capture what `resident` observed."""
        self.core.driver.synchronize()
        self.core.cache.settle()

    def timed(self, work: Callable[[], object]) -> float:
        """Milliseconds on the device's clock from an idle device to the end of what `work` submits.

        The host's submission is in it, as it is in a user's wall clock.
        """
        driver = self.core.driver
        driver.synchronize()
        before = driver.mark(timed=True)
        work()
        after = driver.mark(timed=True)
        after.wait()
        return after.ms_since(before)

    def close(self) -> None:
        """Release graphs and memory. May be called twice."""
        self.core.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _rung(self, num_sequences: int) -> int:
        return min(1 << (num_sequences - 1).bit_length(), self.core.config.num_parallel)
