"""Which tests a benchmark runs, and how each is cut into steps. Pure.

Owns BenchTest (one row), the order of the combinations, and the rule by which the prompts of
several sequences share a step (the scheduler's rule 3). Does not parse, run or time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from graphseed.engine.chunks import rungs

SHORT_DECODE_LEN: Final = 16  # tokens of the decode beside a prompt row that has no decode row


@dataclass(frozen=True, slots=True)
class BenchTest:
    """One row: a prompt, an answer, or one after the other, behind `depth_len` tokens."""

    prompt_len: int  # of each sequence; 0: no prompt is timed
    new_len: int  # tokens that each sequence decodes; 0: none
    depth_len: int = 0  # tokens of context before, prefilled and not timed
    num_batch: int = 2048
    num_ubatch: int = 512
    num_parallel: int = 1  # sequences

    @property
    def name(self) -> str:
        """The row's name as llama-bench writes it: `pp512`, `tg128`, `pp512+tg128 @ d4096`."""
        parts = [f"pp{self.prompt_len}"] if self.prompt_len else []
        parts += [f"tg{self.new_len}"] if self.new_len else []
        return "+".join(parts) + (f" @ d{self.depth_len}" if self.depth_len else "")

    @property
    def num_tokens(self) -> int:
        """Tokens of one repetition, over all sequences."""
        return self.num_parallel * (self.prompt_len + self.new_len)

    @property
    def pass_len(self) -> int:
        """Tokens that one forward pass sees at most: neither -b nor -ub is exceeded."""
        return min(self.num_batch, self.num_ubatch)

    @property
    def context_len(self) -> int:
        """Tokens of one sequence, with room for the short decode."""
        return self.depth_len + self.prompt_len + max(self.new_len, SHORT_DECODE_LEN)

    @property
    def capacity(self) -> int:
        """Rows of the largest step: what an engine needs that runs this test alone.

        The plans are those of an engine of `pass_len`: a step that is never filled is padded alike.
        """
        most = self.num_parallel * max(self.prompt_len, self.depth_len, 1)
        return min(self.pass_len, next(rung for rung in rungs() if rung >= most))

    def prompt_steps(self, start: int, end: int) -> Iterator[tuple["Piece", ...]]:
        """The steps that prefill positions start..end-1 of every sequence.

        A step takes the next chunk of the first unfinished sequence, then whole next chunks of the
        following ones while all fit.
        """
        done = [start] * self.num_parallel
        while any(at < end for at in done):
            step: list[Piece] = []
            for sequence, at in enumerate(done):
                if at == end:
                    continue
                length = min(self.pass_len, end - at)
                if sum(piece.num_tokens for piece in step) + length > self.pass_len:
                    break
                step.append(Piece(sequence, at, length))
            for piece in step:
                done[piece.sequence] += piece.num_tokens
            yield tuple(step)

    def decode_steps(self, start: int, num_steps: int) -> Iterator[tuple["Piece", ...]]:
        """The steps that decode `num_steps` tokens of every sequence, from a position on."""
        for position in range(start, start + num_steps):
            yield tuple(Piece(sequence, position, 1) for sequence in range(self.num_parallel))

    def timed_steps(self) -> Iterator[tuple["Piece", ...]]:
        """The steps of one repetition."""
        middle = self.depth_len + self.prompt_len
        yield from self.prompt_steps(self.depth_len, middle)
        yield from self.decode_steps(middle, self.new_len)


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of one sequence in a step."""

    sequence: int  # its number
    start: int  # position of the first token
    num_tokens: int


def grid(
    *,
    prompt_lens: Sequence[int],
    new_lens: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    depth_lens: Sequence[int],
    num_batches: Sequence[int],
    num_ubatches: Sequence[int],
    num_parallels: Sequence[int],
) -> list[tuple[BenchTest, ...]]:
    """Every combination, in groups whose rows differ only in prompt and answer.

    Lengths of 0 give no row. A group holds the prompt rows, then the decode rows, then the pairs.
    """
    lens = [(length, 0) for length in prompt_lens]
    lens += [(0, length) for length in new_lens]
    lens = [pair for pair in (*lens, *pairs) if any(pair)]
    return [
        tuple(BenchTest(*pair, *setting) for pair in lens)
        for setting in product(depth_lens, num_batches, num_ubatches, num_parallels)
    ]
