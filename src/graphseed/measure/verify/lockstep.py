"""Several policies run the same plans side by side, and every byte is compared at every step.

Owns Side (one policy's session), the expected KV memory, and Lockstep, which runs one step on all
sides. Does not choose plans and does not know rounds.

What a step writes is filled with junk before it runs, and so is all memory that nothing wrote yet,
with other junk on the reference than elsewhere: an output nobody wrote shows, and so does an input
nobody should have read. The whole KV memory but block 0 is compared after each step, so a row that
was written and is not the step's shows too, on the reference as well.
"""

# R rows of KV memory, T rows the step writes, S sequences, V vocabulary

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from graphseed.engine.errors import NotFinite
from graphseed.engine.kv import KvMemory
from graphseed.engine.plan import StepPlan
from graphseed.measure.session import Session
from graphseed.measure.verify.case_plans import Step
from graphseed.measure.verify.differences import (
    Answers,
    Difference,
    Kind,
    OffRows,
    any_unwritten,
    as_words,
    first_off,
    junk_word,
    off_rows,
)

REFERENCE_JUNK: Final = 0xA5  # tiny numbers in every dtype
JUNK: Final = 0x5A  # large ones, finite in every dtype


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the proof a step stands."""

    case: str
    round_number: int
    step_number: int


class KvRows:
    """The K and V rows of one KV memory, layer by layer. Borrows the memory."""

    def __init__(self, kv: KvMemory, junk: int) -> None:
        self.junk = junk
        self.names = tuple((layer, what) for layer in range(len(kv.k)) for what in ("K", "V"))
        pairs = zip(kv.k, kv.v, strict=True)
        self.rows = tuple(c.flatten(0, 1).flatten(1) for pair in pairs for c in pair)  # [R, H * D]
        self.words = tuple(as_words(rows) for rows in self.rows)  # [R, W]
        for words in self.words:
            words.fill_(junk_word(junk, words))

    def spoil(self, written: torch.Tensor) -> None:
        """Fill rows [T] int64 with junk."""
        for words in self.words:
            words.index_fill_(0, written, junk_word(self.junk, words))


class Side:
    """One policy: its session and what is known of it. Borrows the session."""

    def __init__(self, name: str, session: Session, junk: int) -> None:
        self.name = name
        self.session = session
        self.answers = Answers()
        session.core.log.subscribe(self.answers)
        self.kv = KvRows(session.core.runner.kv, junk)
        self.sha = hashlib.sha256()  # of the case at hand: whoever runs it starts it anew

    @property
    def logits(self) -> torch.Tensor:
        """The static logits buffer, [S, V] float32."""
        return self.session.core.runner.logits

    def run(self, step: Step, written: torch.Tensor) -> None:
        """Run one step over junk, as an engine would that knows what the step says."""
        self.kv.spoil(written)
        words = as_words(self.logits)
        words.fill_(junk_word(self.kv.junk, words))
        cache = self.session.core.cache
        cache.num_unfinished_prompts = step.num_unfinished
        try:
            self.session.run(step.plan)
            if step.has_more:
                cache.settle(1)
        finally:
            cache.num_unfinished_prompts = 0


class Lockstep:
    """Runs each step on the reference, then on every other side, and compares.

    Owned by one proof; one thread. `sides[0]` is the reference: graphs disabled.
    """

    def __init__(self, sides: list[Side], expected: KvMemory, expected_reference: KvMemory) -> None:
        self.sides = sides
        self._reference = sides[0]
        self._expected = {
            JUNK: KvRows(expected, JUNK),
            REFERENCE_JUNK: KvRows(expected_reference, REFERENCE_JUNK),
        }
        config = self._reference.session.core.config
        self._skip = config.block_len  # rows of block 0, which nobody reads
        num_rows = config.num_blocks * config.block_len
        self._owner = np.full(num_rows, -1, dtype=np.int32)  # sequence of the case
        self._position = np.zeros(num_rows, dtype=np.int32)

    def begin_case(self) -> None:
        """Forget who held which row, and start the digests anew."""
        self._owner.fill(-1)
        for side in self.sides:
            side.sha = hashlib.sha256()

    def run(self, step: Step, place: Place) -> list[Difference]:
        """Run one step everywhere and return what differs; a side that did is put right again.

        Raises NotFinite when the reference computed no numbers: then nothing can be proven.
        """
        indices = self._own(step)
        written = torch.from_numpy(indices).long().to(self._reference.logits.device)
        for side in self.sides:
            side.run(step, written)
        num_read = len(step.plan.parts)
        self._check_finite(step.plan)
        found = self._unwritten(step, place, written)
        for expected in self._expected.values():
            for mine, theirs in zip(expected.rows, self._reference.kv.rows, strict=True):
                mine.index_copy_(0, written, theirs.index_select(0, written))
        for side in self.sides:
            found += self._compare_kv(side, step, place, written)
            found += self._compare_logits(side, step, place, num_read)
            side.sha.update(_bytes_of(side.logits[:num_read]))
        return found

    def add_kv_to_digests(self, kv_indices: torch.Tensor) -> None:
        """Add the rows at `kv_indices` [T] of each side's own KV memory to its digest."""
        for side in self.sides:
            side.sha.update(side.session.core.runner.kv.digest(kv_indices).encode())

    def _own(self, step: Step) -> np.ndarray:
        """KV rows that the step writes, in the order of its rows, noted as its sequences'."""
        rows = []
        for part, sequence in zip(step.plan.parts, step.sequences, strict=True):
            indices = part.table.kv_indices(part.start, part.kv_len)
            self._owner[indices] = sequence
            self._position[indices] = np.arange(part.start, part.kv_len)
            rows.append(indices)
        return np.concatenate(rows)

    def _check_finite(self, plan: StepPlan) -> None:
        best = self._reference.logits[: len(plan.parts)].amax(1)
        if not bool(best.isfinite().all()):
            row = int((~best.isfinite()).nonzero()[0])
            raise NotFinite(plan.parts[row].kv_len - 1, float(best[row]))

    def _unwritten(self, step: Step, place: Place, written: torch.Tensor) -> list[Difference]:
        """Rows that the reference itself did not write: every side may agree about those."""
        kv, found = self._reference.kv, []
        for (layer, what), rows in zip(kv.names, kv.rows, strict=True):
            is_off = any_unwritten(rows.index_select(0, written), kv.junk)
            if bool(is_off.any()):
                found.append((layer, what, OffRows(written[is_off], 0.0, True)))
        logits = self._reference.logits[: len(step.plan.parts)]
        is_off = any_unwritten(logits, kv.junk)
        differences = [self._kv_difference(self._reference, place, Kind.UNWRITTEN, found)]
        if bool(is_off.any()):
            part = int(is_off.nonzero()[0])
            off = OffRows(is_off.nonzero().flatten(), 0.0, True)
            differences.append(self._logits_difference(self._reference, step, place, part, off))
        return [difference for difference in differences if difference is not None]

    def _compare_kv(
        self, side: Side, step: Step, place: Place, written: torch.Tensor
    ) -> list[Difference]:
        expected, skip, own, outside = self._expected[side.kv.junk], self._skip, [], []
        for index, name in enumerate(side.kv.names):
            got, want = side.kv.words[index], expected.words[index]
            if torch.equal(got[skip:], want[skip:]):
                continue
            mine, theirs = side.kv.rows[index], expected.rows[index]
            off = off_rows(mine, theirs, written, side.kv.junk)
            if off is not None:
                own.append((*name, off))
            others = (got != want).any(1)
            others[:skip] = False
            others[written] = False
            off = off_rows(mine, theirs, others.nonzero().flatten(), side.kv.junk)
            if off is not None:
                outside.append((*name, off))
            got[skip:].copy_(want[skip:])  # one cause is told once
        found = [
            self._kv_difference(side, place, Kind.DIFFERS, own),
            self._kv_difference(side, place, Kind.OUTSIDE, outside),
        ]
        return [difference for difference in found if difference is not None]

    def _compare_logits(
        self, side: Side, step: Step, place: Place, num_read: int
    ) -> list[Difference]:
        got, want = side.logits[:num_read], self._reference.logits[:num_read]
        if torch.equal(as_words(got), as_words(want)):
            return []
        off = off_rows(got, want, torch.arange(num_read, device=got.device), side.kv.junk)
        if off is None:
            return []
        return [self._logits_difference(side, step, place, int(off.rows[0]), off)]

    def _kv_difference(
        self, side: Side, place: Place, kind: Kind, found: list[tuple[int, str, OffRows]]
    ) -> Difference | None:
        if not found:
            return None
        layer, what, row, num_rows, largest, is_junk = first_off(found)
        owner = int(self._owner[row])
        return Difference(
            policy=side.name, case=place.case, round_number=place.round_number,
            step_number=place.step_number, identity=side.answers.identity,
            answered=side.answers.last, what=what,
            kind=Kind.UNWRITTEN if kind is Kind.DIFFERS and is_junk else kind,
            layer=layer, sequence=owner if owner >= 0 else None,
            position=int(self._position[row]) if owner >= 0 else None,
            num_rows=num_rows, largest=largest,
        )  # fmt: skip

    def _logits_difference(
        self, side: Side, step: Step, place: Place, part: int, off: OffRows
    ) -> Difference:
        return Difference(
            policy=side.name, case=place.case, round_number=place.round_number,
            step_number=place.step_number, identity=side.answers.identity,
            answered=side.answers.last, what="logits",
            kind=Kind.UNWRITTEN if off.is_junk else Kind.DIFFERS,
            layer=None, sequence=step.sequences[part], position=step.plan.parts[part].kv_len - 1,
            num_rows=len(off.rows), largest=off.largest,
        )  # fmt: skip


def _bytes_of(logits: torch.Tensor) -> bytes:
    return logits.cpu().numpy().tobytes()
