"""Who holds which KV block, and which blocks hold tokens seen before. Pure: no device memory.

Owns BlockPool (free blocks, reference counts, whole blocks that can be found by their tokens),
BlockTable (one sequence's list) and the digests of token lists. Block 0 is never handed out: padded
rows write there and nobody reads it. Does not know when K/V is written: `publish` is told.

A whole block is found by a digest over its token ids and the digest of the block before it, so a
digest stands for every token from position 0 on. Published blocks are never written again: only
whole ones are published, and a sequence writes behind them, into blocks of its own.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from graphseed.capture.errors import GraphseedError

# 256 bits: a collision would answer one prompt with another's K/V, also when somebody looks for it.
_DIGEST_BYTES: Final = 32


class OutOfBlocks(GraphseedError):
    """The pool has fewer free blocks than were asked for; none was taken."""


class BlockPool:
    """The blocks of one KV memory. Owned by the engine; engine thread only.

    A block is free, held (by one table or, once published, by several), or idle: published, held by
    none and findable until it is evicted, the least recently held first.
    """

    def __init__(self, num_blocks: int, block_len: int, reuses_prefixes: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_len = block_len
        self.reuses_prefixes = reuses_prefixes
        self.generation = 0  # of the memory; tables of an older one publish nothing
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the lowest numbers go first
        self._num_refs = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently held first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now: free ones, and idle ones that would be evicted."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks, or none: raises OutOfBlocks. Evicts only when none is free."""
        if count > self.num_free:
            raise OutOfBlocks(
                f"{count} KV blocks were asked for and {self.num_free} of "
                f"{self.num_blocks - 1} are free"
            )
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        taken += [self._evict() for _ in range(count - len(taken))]
        for block in taken:
            self._num_refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold published blocks once more each."""
        for block in blocks:
            if not self._num_refs[block]:
                del self._idle[block]
            self._num_refs[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Hold blocks once less each. Raises ValueError for one that is not held."""
        for block in blocks:
            if not 0 < block < self.num_blocks or not self._num_refs[block]:
                raise ValueError(f"block {block} was not taken from this pool")
            self._num_refs[block] -= 1
            if self._num_refs[block]:
                continue
            if block in self._digest_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def find(self, digest: bytes) -> int | None:
        """The block published under a digest, held or idle."""
        return self._block_of.get(digest)

    def publish(self, digest: bytes, block: int) -> None:
        """Make a held, fully written block findable; the first one of a digest stays it."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def withdraw(self, digest: bytes) -> None:
        """Make a block unfindable; whoever holds it keeps it. Nothing happens when none is."""
        block = self._block_of.pop(digest, None)
        if block is None:
            return
        del self._digest_of[block]
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def forget(self) -> None:
        """Drop everything that was published: memory moved, or the weights that wrote it did."""
        self.generation += 1
        self._block_of.clear()
        self._digest_of.clear()
        self._free.extend(reversed(self._idle))
        self._idle.clear()

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        return block


class BlockTable:
    """The blocks of one sequence, in order of position. Owned by its request.

    Token lists given to `match_prefix` and `publish` may grow between two calls and must not change
    otherwise: the digests of a list object are computed once.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self._ids = np.zeros(max_blocks, dtype=np.int32)
        self._offsets = np.arange(pool.block_len, dtype=np.int32)
        self._digests = _DigestChain(pool.block_len)
        self._generation = pool.generation
        self._num_published = 0  # blocks from the first on that need no publishing
        self.num_blocks = 0

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Block numbers, [num_blocks]."""
        return self._ids[: self.num_blocks]

    def grow(self, num_tokens: int) -> None:
        """Hold enough blocks for `num_tokens`. Raises OutOfBlocks and then holds what it held."""
        needed = -(-num_tokens // self._pool.block_len)
        if needed <= self.num_blocks:
            return
        if needed > len(self._ids):
            raise ValueError(
                f"{num_tokens} tokens need {needed} KV blocks and a sequence holds at most "
                f"{len(self._ids)}; end it when the context is full"
            )
        self._append(self._pool.take(needed - self.num_blocks))

    def kv_indices(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Where the K/V of positions start..end-1 lives: block * block_len + offset, int32."""
        length = self._pool.block_len
        first = start // length
        # Whole blocks, cut at both ends: a division for each token would take four times as long.
        starts = self._ids[first : -(-end // length)] * np.int32(length)
        indices = (starts[:, None] + self._offsets).ravel()
        return indices[start - first * length : end - first * length]

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        """Hold the longest published chain of whole blocks that `token_ids` begin with.

        Returns the cached tokens, a multiple of the block length that leaves at least one token to
        run; 0 when the pool does not reuse prefixes. Raises ValueError unless the table is empty.
        """
        if self.num_blocks:
            raise ValueError(
                f"the table holds {self.num_blocks} blocks; a prefix is matched when it is empty"
            )
        blocks = self._matching(token_ids)
        self._pool.share(blocks)
        self._append(blocks)
        self._num_published = len(blocks)
        return len(blocks) * self._pool.block_len

    def publish(self, token_ids: Sequence[int], num_written: int) -> None:
        """Make whole blocks findable, now that the K/V of the first `num_written` ids is written.

        A chain that another block holds already keeps it. Raises ValueError for more tokens than
        `token_ids` or the table has. Costs what is new since the last call.
        """
        num_held = self.num_blocks * self._pool.block_len
        if num_written > min(len(token_ids), num_held):
            raise ValueError(
                f"{num_written} tokens are said to be written; {len(token_ids)} token ids were "
                f"given and the table holds {num_held}"
            )
        if not self._pool.reuses_prefixes or self._generation != self._pool.generation:
            return
        for index in range(self._num_published, num_written // self._pool.block_len):
            digest = self._digests.of_block(token_ids, index)
            self._pool.publish(digest, int(self._ids[index]))
            self._num_published = index + 1

    def close(self) -> None:
        """Give every block back. May be called twice."""
        blocks = self.ids.tolist()
        self.num_blocks = self._num_published = 0
        # The last first: of an idle chain the end is evicted before what leads to it.
        self._pool.give_back(reversed(blocks))

    def _matching(self, token_ids: Sequence[int]) -> list[int]:
        blocks: list[int] = []
        if not self._pool.reuses_prefixes:
            return blocks
        for index in range(min((len(token_ids) - 1) // self._pool.block_len, len(self._ids))):
            # Looked up block by block: a prompt that nobody sent before costs one digest.
            block = self._pool.find(self._digests.of_block(token_ids, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _append(self, blocks: list[int]) -> None:
        if not self.num_blocks:
            self._generation = self._pool.generation
        end = self.num_blocks + len(blocks)
        self._ids[self.num_blocks : end] = blocks
        self.num_blocks = end


def chain_digests(token_ids: Sequence[int], block_len: int) -> list[bytes]:
    """Digests of the whole blocks that `token_ids` begin with: what they are published under."""
    chain = _DigestChain(block_len)
    return [chain.of_block(token_ids, index) for index in range(len(token_ids) // block_len)]


class _DigestChain:
    """Digests of the whole blocks of one token list, each computed once."""

    def __init__(self, block_len: int) -> None:
        self._block_len = block_len
        self._token_ids: Sequence[int] | None = None
        self._digests: list[bytes] = []

    def of_block(self, token_ids: Sequence[int], index: int) -> bytes:
        """Digest of all tokens up to the end of block `index`."""
        if token_ids is not self._token_ids:  # another list: what is known is of no use
            self._token_ids, self._digests = token_ids, []
        digests = self._digests
        while len(digests) <= index:
            start = len(digests) * self._block_len
            ids = array("i", token_ids[start : start + self._block_len])
            parent = digests[-1] if digests else b""
            digests.append(blake2b(parent + ids.tobytes(), digest_size=_DIGEST_BYTES).digest())
        return digests[index]
