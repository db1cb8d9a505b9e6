"""Cutting a prompt into chunks. Pure.

Owns the tail ladder and the chunk plan. The plan depends on lengths alone, never on the policy, so
graphs off and on do the same arithmetic (I9).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from graphseed.engine.errors import BadParameter


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous part of one prompt, padded to a planned size."""

    start: int  # position of its first token
    num_tokens: int  # real ones
    capacity: int  # rows of the step, padding included

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens


def rungs() -> Iterator[int]:
    """The ladder without end: 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, ..."""
    yield 16
    base = 32
    while True:
        yield base
        yield base + base // 2
        base *= 2


def capacity_of(num_tokens: int, num_ubatch: int) -> int:
    """Rows that a chunk of `num_tokens` is padded to: its rung, at most `num_ubatch`."""
    if not 1 <= num_tokens <= num_ubatch:
        raise BadParameter("chunk length", num_tokens, f"1 to {num_ubatch} tokens")
    return min(next(rung for rung in rungs() if rung >= num_tokens), num_ubatch)


def plan_chunks(num_tokens: int, num_ubatch: int, num_cached: int = 0) -> tuple[Chunk, ...]:
    """Cut the uncached part of a prompt: full chunks of `num_ubatch`, then the padded tail."""
    if not 0 <= num_cached < num_tokens:
        raise BadParameter("cached tokens", num_cached, f"0 to {num_tokens - 1}")
    chunks = []
    for start in range(num_cached, num_tokens, num_ubatch):
        length = min(num_ubatch, num_tokens - start)
        chunks.append(Chunk(start, length, capacity_of(length, num_ubatch)))
    return tuple(chunks)
