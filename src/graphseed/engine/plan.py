"""What one step computes, as a value.

Owns StepPlan: everything needed to run the same arithmetic again with graphs off (I9). Does not
know policies, and holds no device memory.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from graphseed.capture.identity import Namespace


class Reads(Enum):
    """What of a step is read when it is done."""

    LOGITS = "logits"  # of each part's last token
    HIDDEN = "hidden"  # the last hidden state of every row


class Table(Protocol):
    """Where a sequence's K/V lives: a BlockTable, or one read back from a record."""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Block numbers, in order of position."""

    def kv_indices(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Where the K/V of positions start..end-1 lives."""


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The tokens of one sequence in a step."""

    token_ids: npt.NDArray[np.int32]  # real tokens of this step
    start: int  # position of the first
    table: Table

    @property
    def kv_len(self) -> int:
        """K/V length of the sequence after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: sequences packed into `capacity` rows."""

    namespace: Namespace
    capacity: int  # rows, padding included
    parts: tuple[SequencePart, ...]
    seq_capacity: int = 1
    reads: Reads = Reads.LOGITS

    @property
    def num_tokens(self) -> int:
        """Real rows."""
        return sum(len(part.token_ids) for part in self.parts)
