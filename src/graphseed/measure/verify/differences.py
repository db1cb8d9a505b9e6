"""What two runs of one plan may differ in, and where they first do.

Owns Difference (a value that names everything a reader needs), Answers (how each observation was
answered) and the comparison of rows as bytes. Does not run plans and does not know policies.
"""

# R rows of KV memory (or of logits), W words of 8 bytes in a row

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from graphseed.capture.events import Direct, Event, Refused, Replayed
from graphseed.capture.identity import GraphIdentity, Namespace


class Kind(Enum):
    """What is wrong with a row."""

    DIFFERS = "differs"
    UNWRITTEN = "was not written"
    OUTSIDE = "was changed by a step that does not write it"


@dataclass(frozen=True, slots=True)
class Difference:
    """One output of one step that is not what the run with graphs disabled made of it."""

    policy: str
    case: str
    round_number: int  # from 1
    step_number: int  # in the case, from 1
    identity: str
    answered: str  # how the cache answered the observation
    what: str  # logits, K or V
    kind: Kind
    layer: int | None  # the first one that differs, from 0; None for logits
    sequence: int | None  # of the case; None: no live sequence of it holds the row
    position: int | None  # in that sequence
    num_rows: int  # that differ, over all layers
    largest: float  # absolute difference over all of them; inf where one is no number

    def __str__(self) -> str:
        where = self.what if self.layer is None else f"layer {self.layer} {self.what}"
        at = "in a block no sequence holds"
        if self.sequence is not None:
            at = f"at position {self.position} of sequence {self.sequence}"
        return (
            f"policy {self.policy}, {self.case}, round {self.round_number}, step "
            f"{self.step_number}, {self.answered}: {where} {self.kind.value} {at}; "
            f"{self.num_rows} rows, largest difference {self.largest:.3g}; identity "
            f"[{self.identity}]"
        )

    def as_record(self) -> dict[str, object]:
        """The fields as JSON takes them; a difference that is no number is null."""
        return {
            "policy": self.policy, "case": self.case, "round": self.round_number,
            "step": self.step_number, "identity": self.identity, "answered": self.answered,
            "what": self.what, "kind": self.kind.value, "layer": self.layer,
            "sequence": self.sequence, "position": self.position, "num_rows": self.num_rows,
            "largest": self.largest if math.isfinite(self.largest) else None,
        }  # fmt: skip


class Answers:
    """Subscriber: how the last observation was answered, and what was refused or replayed."""

    def __init__(self) -> None:
        self.last = ""
        self.identity = ""
        self.seen: set[GraphIdentity] = set()
        self.replayed: set[GraphIdentity] = set()
        # Where, reason and detail, in order, each once.
        self.refusals: dict[Namespace, dict[str, None]] = {n: {} for n in Namespace}

    def __call__(self, event: Event) -> None:
        match event:
            case Direct():
                self.seen.add(event.identity)
                self.last = f"direct ({event.why.value})"
                self.identity = str(event.identity)
            case Replayed():
                self.seen.add(event.identity)
                self.replayed.add(event.identity)
                self.last = f"replayed (number {event.num_replays})"
                self.identity = str(event.identity)
            case Refused():
                where = f"{event.namespace.value} graph of {event.identity.get('tokens')} tokens"
                said = f"{where}: {event.reason.value} ({event.detail})"
                self.refusals[event.namespace][said] = None


@dataclass(frozen=True, slots=True)
class OffRows:
    """Rows of one tensor whose bytes differ."""

    rows: torch.Tensor  # [N] int64, on the device
    largest: float
    is_junk: bool  # whether the first of them holds nothing but what was filled in before


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """A view of rows [R, ...] as whole numbers [R, W] that are equal iff the bytes are."""
    flat = rows.flatten(1)
    num_bytes = flat.shape[1] * flat.element_size()
    return flat.view(torch.int64 if num_bytes % 8 == 0 else torch.uint8)


def junk_word(junk: int, words: torch.Tensor) -> int:
    """The number whose every byte is `junk`, for words of this kind."""
    size = words.element_size()
    return int.from_bytes(bytes([junk]) * size, "little", signed=size > 1)


def off_rows(
    got: torch.Tensor, want: torch.Tensor, among: torch.Tensor, junk: int
) -> OffRows | None:
    """Rows of `among` ([N] int64, in order) in which `got` and `want` [R, ...] differ.

    `junk` is the byte that `got` was filled with before it was written. None where all are equal.
    """
    mine, other = got.index_select(0, among), want.index_select(0, among)
    is_off = (as_words(mine) != as_words(other)).any(1)
    if not bool(is_off.any()):
        return None
    apart = (mine[is_off].double() - other[is_off].double()).abs()
    # Equal bytes are no difference, NaN or not; other bytes that are no number are the largest.
    apart = torch.where(mine[is_off] == other[is_off], 0.0, apart.nan_to_num(nan=math.inf))
    first = as_words(mine[is_off][:1])
    is_junk = bool((first == junk_word(junk, first)).all())
    return OffRows(among[is_off], float(apart.max()), is_junk)


def any_unwritten(rows: torch.Tensor, junk: int) -> torch.Tensor:
    """Which of rows [R, ...] still hold nothing but `junk`, [R] bool."""
    words = as_words(rows)
    return (words == junk_word(junk, words)).all(1)


def first_off(found: Sequence[tuple[int, str, OffRows]]) -> tuple[int, str, int, int, float, bool]:
    """Layer, K or V, row, number of rows, largest difference and junk of what was found in order.

    `found` holds at least one (layer, "K" or "V", rows), by rising layer and K before V.
    """
    layer, what, off = found[0]
    num_rows = sum(len(other.rows) for _, _, other in found)
    largest = max(other.largest for _, _, other in found)
    return layer, what, int(off.rows[0]), num_rows, largest, off.is_junk
