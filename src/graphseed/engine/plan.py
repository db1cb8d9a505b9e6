"""What one step computes, as a value.

Owns StepPlan: everything needed to run the same arithmetic again with graphs off (I9). Does not
know policies, and holds no device memory.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphseed.capture.identity import Namespace
from graphseed.engine.blocks import BlockTable


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The tokens of one sequence in a step."""

    token_ids: npt.NDArray[np.int32]  # real tokens of this step
    start: int  # position of the first
    table: BlockTable

    @property
    def kv_len(self) -> int:
        """K/V length of the sequence after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: sequences packed into `capacity` rows, each read at its last token."""

    namespace: Namespace
    capacity: int  # rows, padding included
    parts: tuple[SequencePart, ...]
    seq_capacity: int = 1

    @property
    def num_tokens(self) -> int:
        """Real rows."""
        return sum(len(part.token_ids) for part in self.parts)
