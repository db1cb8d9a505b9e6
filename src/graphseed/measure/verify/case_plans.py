"""A case made into plans: tokens drawn, blocks taken, every table a value.

Owns the Planner of one case in one round. The plans it yields name blocks by number and change no
more, so several sessions of one size can run the very same ones. Does not run or compare anything.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import TracebackType

import numpy as np
import torch

from graphseed.engine.plan import StepPlan
from graphseed.engine.record import RecordedTable
from graphseed.measure.session import Session, Slot
from graphseed.measure.verify.cases import Case, Decode, Part, Prefill, Release


@dataclass(frozen=True, slots=True)
class Step:
    """One plan, and what an engine would know when it runs it."""

    plan: StepPlan
    sequences: tuple[int, ...]  # numbers in the case, one for each part
    num_unfinished: int  # prompts whose chunks are not all submitted
    has_more: bool = False  # more chunks of the prompt follow


@dataclass(slots=True)
class _Sequence:
    slot: Slot
    token_ids: list[int] = field(default_factory=list)


class Planner(AbstractContextManager["Planner"]):
    """Plans one case with the blocks of one session. Owns its slots; closed by its owner."""

    def __init__(self, session: Session, case: Case, vocab_size: int, seed: list[int]) -> None:
        self._session = session
        self._case = case
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)
        self._sequences: dict[int, _Sequence] = {}
        self._num_unfinished = 0

    def steps(self) -> Iterator[Step | Release]:
        """Yield the case's steps in order; each must have run before the next is asked for."""
        for action in self._case.actions:
            yield from self._expand(action)

    def token_ids(self) -> dict[int, tuple[int, ...]]:
        """The tokens of each sequence planned so far."""
        return {number: tuple(s.token_ids) for number, s in self._sequences.items()}

    def kv_indices(self) -> torch.Tensor:
        """Rows of KV memory that hold the planned tokens of all sequences, int32."""
        return torch.cat([s.slot.kv_indices() for s in self._sequences.values()])

    def close(self) -> None:
        """Give the blocks back. May be called twice."""
        for sequence in self._sequences.values():
            sequence.slot.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _expand(self, action: Prefill | Decode | Release) -> Iterator[Step | Release]:
        match action:
            case Prefill() if len(action.parts) == 1:
                yield from self._chunked(action)
            case Prefill():
                yield self._packed(action)
                self._publish(action)
            case Decode():
                for _ in range(action.num_steps):
                    yield self._decode(action)
            case Release():
                yield action

    def _chunked(self, action: Prefill) -> Iterator[Step | Release]:
        number = action.parts[0].sequence
        sequence, num_cached = self._admit(action.parts[0])
        plans = sequence.slot.prompt(sequence.token_ids[num_cached:])
        self._num_unfinished += 1
        for index, plan in enumerate(plans, 1):
            has_more = index < len(plans)
            yield Step(_frozen(plan, self._block_len), (number,), self._num_unfinished, has_more)
            if has_more:
                for inner in action.between:
                    yield from self._expand(inner)
        self._num_unfinished -= 1
        self._publish(action)

    def _packed(self, action: Prefill) -> Step:
        parts = []
        for part in action.parts:
            sequence, num_cached = self._admit(part)
            parts.append(sequence.slot.part(sequence.token_ids[num_cached:]))
        plan = _frozen(self._session.packed(parts), self._block_len)
        return Step(plan, tuple(part.sequence for part in action.parts), self._num_unfinished)

    def _decode(self, action: Decode) -> Step:
        parts = []
        for number in action.sequences:
            sequence = self._sequences[number]
            token_ids = self._drawn(1)
            sequence.token_ids += token_ids
            parts.append(sequence.slot.part(token_ids))
        plan = _frozen(self._session.decode(parts), self._block_len)
        return Step(plan, action.sequences, self._num_unfinished)

    def _admit(self, part: Part) -> tuple[_Sequence, int]:
        """A new sequence with the tokens of its prompt, and how many of them are cached."""
        sequence = _Sequence(self._session.slot())
        if part.shares is not None:
            sequence.token_ids += self._sequences[part.shares].token_ids[: part.num_shared]
        sequence.token_ids += self._drawn(part.num_tokens - len(sequence.token_ids))
        self._sequences[part.sequence] = sequence
        num_cached = sequence.slot.table.match_prefix(sequence.token_ids)
        sequence.slot.num_tokens = num_cached
        return sequence, num_cached

    def _publish(self, action: Prefill) -> None:
        for part in action.parts:
            sequence = self._sequences[part.sequence]
            sequence.slot.table.publish(sequence.token_ids, sequence.slot.num_tokens)

    def _drawn(self, num: int) -> list[int]:
        return [int(i) for i in self._random.integers(0, self._vocab_size, size=num)]

    @property
    def _block_len(self) -> int:
        return self._session.core.config.block_len


def _frozen(plan: StepPlan, block_len: int) -> StepPlan:
    """The plan with every table as it is now."""
    parts = tuple(
        replace(part, table=RecordedTable(part.table.ids.copy(), block_len)) for part in plan.parts
    )
    return replace(plan, parts=parts)
