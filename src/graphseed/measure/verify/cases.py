"""What `verify` runs: prompts of awkward lengths, packed, cached, interleaved, released. Pure.

Owns the cases, a function of sizes alone: what each sequence does, never which tokens or blocks.
Does not know models, sessions or policies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from graphseed.engine.chunks import plan_chunks

ROOM: Final = 8  # tokens that a case may decode behind its longest prompt
_NUM_DECODE_STEPS: Final = 3
_DECODED: Final = (15, 1, 16, 30)  # prompt lengths before a decode: at, before and behind a block


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt: `num_tokens` in all, of which the first may be those of an earlier sequence."""

    sequence: int  # its number in the case
    num_tokens: int
    shares: int | None = None  # the sequence whose first tokens, and blocks, it begins with
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt cut into chunks, or several packed into one step."""

    parts: tuple[Part, ...]
    between: tuple["Action", ...] = ()  # what happens between two chunks


@dataclass(frozen=True, slots=True)
class Decode:
    """One token of each sequence, several times."""

    sequences: tuple[int, ...]
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class Release:
    """All prompt graphs are given back."""


Action: TypeAlias = Prefill | Decode | Release


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences that live together, and what they do in order."""

    name: str
    actions: tuple[Action, ...]
    is_releasing: bool = False  # gives prompt graphs back, so it comes in every second round

    def sequence_lens(self, num_ubatch: int) -> dict[int, int]:
        """Tokens of each sequence when the case is over."""
        lens: dict[int, int] = {}
        for action in self.actions:
            _add_lens(lens, action, num_ubatch)
        return lens


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the cases are a function of."""

    longest: int  # tokens of the longest prompt
    num_ubatch: int
    num_parallel: int
    block_len: int

    @property
    def chunked(self) -> int:
        """A prompt of more than one chunk with a short tail; 0 where none may be so long."""
        wanted = min(self.longest, self.num_ubatch + self.block_len + 1)
        return wanted if wanted > self.num_ubatch else 0

    @property
    def interleaved(self) -> int:
        """The prompt that decodes come between: the longest where that is two chunks."""
        is_short = self.num_ubatch < self.longest <= 2 * self.num_ubatch
        return self.longest if is_short else self.chunked


def make_cases(sizes: Sizes) -> tuple[Case, ...]:
    """Every case in the order of a round; the releasing ones are the last."""
    return (
        *_prompts(sizes),
        *_prefixes(sizes),
        *_packed(sizes),
        *_interleaved(sizes),
        *_decodes(sizes),
        *_releases(sizes),
    )


def prompt_lens(sizes: Sizes) -> tuple[int, ...]:
    """Awkward lengths: around a block and a ubatch, several chunks, and the longest."""
    block, ubatch = sizes.block_len, sizes.num_ubatch
    lens = {
        1, block - 1, block, block + 1, ubatch - 1, ubatch, ubatch + 1,
        2 * ubatch + ubatch // 3, sizes.longest,
    }  # fmt: skip
    return tuple(sorted(n for n in lens if 1 <= n <= sizes.longest))


def kv_len_of(cases: tuple[Case, ...], sizes: Sizes) -> int:
    """Tokens of KV memory that the largest case needs, in whole blocks."""
    block = sizes.block_len
    return max(
        sum(-(-n // block) * block for n in case.sequence_lens(sizes.num_ubatch).values())
        for case in cases
    )


def _prompts(sizes: Sizes) -> Iterator[Case]:
    for num_tokens in prompt_lens(sizes):
        if num_tokens == sizes.interleaved and num_tokens > sizes.num_ubatch + 1:
            continue  # it comes with decodes between its chunks, and once is enough
        prefill = Prefill((Part(0, num_tokens),))
        if num_tokens != sizes.num_ubatch + 1:
            yield Case(_tokens(num_tokens), (prefill,))
            continue
        # Costs one short chunk more than the prompt alone, and has the longest prefix.
        num_shared = sizes.num_ubatch // sizes.block_len * sizes.block_len
        again = min(sizes.longest, num_shared + sizes.block_len - 1)
        shared = Prefill((Part(1, again, shares=0, num_shared=num_shared),))
        is_shared = sizes.block_len <= num_shared < again
        name = f"{_tokens(num_tokens)}, then {num_shared} cached"
        yield (
            Case(name, (prefill, shared)) if is_shared else Case(_tokens(num_tokens), (prefill,))
        )


def _prefixes(sizes: Sizes) -> Iterator[Case]:
    shared = 2 * sizes.block_len
    if shared + sizes.block_len + 1 > sizes.longest:
        return
    actions = [
        Prefill((Part(0, shared + 1),)),
        Prefill((Part(1, shared + sizes.block_len + 1, shares=0, num_shared=shared),)),
        Prefill((Part(2, shared + 1, shares=0, num_shared=shared + 1),)),  # the same prompt
    ]
    if sizes.num_parallel > 1 and sizes.num_ubatch >= 12:
        parts = (Part(3, shared + 3, shares=0, num_shared=shared), Part(4, shared + 9, 0, shared))
        actions.append(Prefill(parts))
    yield Case(f"{shared} tokens cached: longer, equal, packed", tuple(actions))


def _packed(sizes: Sizes) -> Iterator[Case]:
    block, ubatch = sizes.block_len, sizes.num_ubatch
    for lens in (
        (1, block - 1),  # no padded row
        (block, block + 1, 1),  # a padded sequence
        (ubatch // 8 - 1, ubatch // 16, ubatch // 4 + 1, 3),
    ):
        if len(lens) > sizes.num_parallel or sum(lens) > ubatch or max(lens) > sizes.longest:
            continue
        if min(lens) >= 1:
            parts = tuple(Part(number, n) for number, n in enumerate(lens))
            yield Case(f"packed {' + '.join(map(str, lens))}", (Prefill(parts),))


def _interleaved(sizes: Sizes) -> Iterator[Case]:
    if not sizes.interleaved:
        return
    actions: list[Action] = [
        Prefill((Part(0, min(5, sizes.num_ubatch)),)),
        # Batch one: under `seed` the release it asks for has to wait for the prompt.
        Prefill((Part(1, sizes.interleaved),), between=(Decode((0,)),)),
    ]
    if sizes.num_parallel > 1:
        actions.append(Decode((0, 1)))
    yield Case(f"decode between chunks of {sizes.interleaved}", tuple(actions))


def _decodes(sizes: Sizes) -> Iterator[Case]:
    for batch in sorted({2, 3, sizes.num_parallel}):
        if not 1 < batch <= sizes.num_parallel:
            continue
        most = min(sizes.longest, sizes.num_ubatch)
        parts = [Part(i, min(most, _DECODED[i % len(_DECODED)])) for i in range(batch)]
        prefills = [Prefill(tuple(pack)) for pack in _packs(parts, sizes.num_ubatch)]
        decode = Decode(tuple(range(batch)), _NUM_DECODE_STEPS)
        yield Case(f"decode of {batch}", (*prefills, decode))


def _releases(sizes: Sizes) -> Iterator[Case]:
    block, most = sizes.block_len, min(sizes.longest, sizes.num_ubatch)
    lens = [min(most, n) for n in (block + 1, block, block - 1)]
    prompts = [Prefill((Part(number, n),)) for number, n in enumerate((lens[0], *lens))]
    decode = Decode((0,), 2)
    yield Case("released by a batch-one decode", (prompts[0], decode, *prompts[1:]), True)
    if sizes.chunked:
        chunked = Prefill((Part(0, sizes.chunked),), between=(Release(),))
        yield Case(f"released between chunks of {sizes.chunked}", (chunked, prompts[1]), True)
    else:
        yield Case("released between prompts", (prompts[0], Release(), prompts[1]), True)


def _packs(parts: list[Part], num_ubatch: int) -> Iterator[list[Part]]:
    pack: list[Part] = []
    for part in parts:
        if sum(p.num_tokens for p in pack) + part.num_tokens > num_ubatch:
            yield pack
            pack = []
        pack.append(part)
    yield pack


def _add_lens(lens: dict[int, int], action: Action, num_ubatch: int) -> None:
    match action:
        case Prefill():
            for part in action.parts:
                lens[part.sequence] = part.num_tokens
                num_gaps = len(plan_chunks(part.num_tokens, num_ubatch)) - 1
                for inner in action.between * num_gaps:
                    _add_lens(lens, inner, num_ubatch)
        case Decode():
            for sequence in action.sequences:
                lens[sequence] += action.num_steps
        case Release():
            pass


def _tokens(num: int) -> str:
    return "1 token" if num == 1 else f"{num} tokens"
