"""Who holds which KV block. Pure: numbers only, no device memory.

Owns BlockPool (free blocks) and BlockTable (one sequence's list). Block 0 is never handed out:
padded rows write there and nobody reads it.
"""

import numpy as np
import numpy.typing as npt

from graphseed.capture.errors import GraphseedError


class OutOfBlocks(GraphseedError):
    """The pool has fewer free blocks than were asked for; none was taken."""


class BlockPool:
    """Free blocks of one KV memory. Owned by the engine; engine thread only."""

    def __init__(self, num_blocks: int, block_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_len = block_len
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the lowest numbers go first
        self._is_taken = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks, or none: raises OutOfBlocks."""
        if count > len(self._free):
            raise OutOfBlocks(
                f"{count} KV blocks were asked for and {len(self._free)} of "
                f"{self.num_blocks - 1} are free"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_taken[block] = 1
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks that were taken. Raises ValueError for one that was not."""
        for block in blocks:
            if not 0 < block < self.num_blocks or not self._is_taken[block]:
                raise ValueError(f"block {block} was not taken from this pool")
            self._is_taken[block] = 0
            self._free.append(block)


class BlockTable:
    """The blocks of one sequence, in order of position. Owned by its request."""

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self._ids = np.zeros(max_blocks, dtype=np.int32)
        self.num_blocks = 0

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Block numbers, [num_blocks]."""
        return self._ids[: self.num_blocks]

    def grow(self, num_tokens: int) -> None:
        """Hold enough blocks for `num_tokens`. Raises OutOfBlocks and then holds what it held."""
        needed = -(-num_tokens // self._pool.block_len)
        if needed > self.num_blocks:
            taken = self._pool.take(needed - self.num_blocks)
            self._ids[self.num_blocks : needed] = taken
            self.num_blocks = needed

    def kv_indices(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Where the K/V of positions start..end-1 lives: block * block_len + offset, int32."""
        positions = np.arange(start, end, dtype=np.int32)
        length = self._pool.block_len
        indices = self._ids[positions // length] * np.int32(length) + positions % length
        return indices.astype(np.int32, copy=False)

    def close(self) -> None:
        """Give every block back. May be called twice."""
        blocks, self.num_blocks = [int(block) for block in self.ids], 0
        self._pool.give_back(blocks)
