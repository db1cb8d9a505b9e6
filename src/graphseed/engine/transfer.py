"""K/V taken out of a running engine and put into one: by blocks, between its steps.

Owns the copies between host and KV memory, and what two engines must have in common. Functions that
take an Engine may be called on any thread but the engine's: they run between its steps, a piece at
a time, so that streams go on meanwhile. Holds no block from one step to the next: no request ever
lacks one for it. Does not know slots or files.
"""

# B blocks, N tokens of a block, H KV heads, D head dim

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from typing import Final

import torch

from graphseed.capture.errors import GraphseedError
from graphseed.engine.blocks import BlockPool, OutOfBlocks, chain_digests
from graphseed.engine.core import EngineCore
from graphseed.engine.engine import Engine
from graphseed.engine.errors import BadParameter, EngineBusy
from graphseed.engine.saved import BadSave, Layout, SavedPrefix, bytes_of
from graphseed.models.model import Model

PIECE_BYTES: Final = 64 << 20  # copied between two steps; 11 ms at 6 GB/s
_NUM_SAMPLES: Final = 64  # elements of each weight that tell models apart


def take_prefix(engine: Engine, token_ids: Sequence[int]) -> SavedPrefix:
    """Copy what the engine still has of the whole blocks that `token_ids` begin with.

    The copy is of one memory and one set of weights, and ends where a block was evicted.
    """
    core = engine.core
    digests = chain_digests(token_ids, core.config.block_len)
    memory, layout, num_found = engine.call(partial(_begin, core, digests))
    rows = [torch.empty(shape, dtype=core.model.dtype) for shape in memory.shapes(num_found)]
    num_taken = 0
    for piece in memory.pieces(num_found):
        parts = engine.call(partial(_read, memory, core, digests[piece]))
        num_read = len(parts[0])
        for own, part in zip(rows, parts, strict=True):
            own[num_taken : num_taken + num_read] = part
        num_taken += num_read
        if num_read < len(digests[piece]):
            break
    num_tokens = num_taken * core.config.block_len
    return SavedPrefix(layout, tuple(token_ids[:num_tokens]), tuple(r[:num_taken] for r in rows))


def put_prefix(engine: Engine, saved: SavedPrefix) -> int:
    """Write saved K/V into free blocks, for prompts to find; returns the tokens that they find.

    These are all, unless other requests needed the blocks at once. Raises BadSave for K/V that is
    not this engine's, BadParameter when the engine reuses no prefixes, OutOfBlocks, and EngineBusy
    when the memory or the weights changed meanwhile; nothing of it can be found then.
    """
    core = engine.core
    digests = chain_digests(saved.token_ids, core.config.block_len)
    memory = engine.call(partial(_check, core, saved, digests))
    written: list[bytes] = []
    try:
        # The end first: what was held last is evicted last, and an end without its beginning is
        # found by nobody.
        for piece in reversed(list(memory.pieces(len(digests)))):
            # Copied here: rows that were read from a file may still be on the disk.
            rows = [cache[piece].clone() for cache in saved.rows]
            written += engine.call(partial(_write, memory, core, digests[piece], rows))
    except BaseException:
        with suppress(GraphseedError):  # the engine may have ended
            engine.call(partial(_withdraw, core, written))
        raise
    return engine.call(lambda: len(_chain(core.pool, digests)) * core.config.block_len)


def forget_prefix(engine: Engine, token_ids: Sequence[int]) -> None:
    """Let no prompt find the whole blocks that `token_ids` begin with any more."""
    digests = chain_digests(token_ids, engine.core.config.block_len)
    engine.call(partial(_withdraw, engine.core, digests))


def layout_of(core: EngineCore) -> Layout:
    """What an engine must have in common with the one that computed K/V. Engine thread only."""
    model = core.model
    config = model.module.config.get_text_config().to_dict()
    layout = {
        "model": model.name,
        "weights": _weights_digest(model),
        "positions": {key: value for key, value in config.items() if "rope" in key},
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": [astuple(layer) for layer in model.layers],
        "block_len": core.config.block_len,
    }
    told: Layout = json.loads(json.dumps(layout, default=str, sort_keys=True))
    return told


@dataclass(frozen=True, slots=True)
class _Memory:
    """One KV memory under one set of weights."""

    pool: BlockPool
    generation: int
    row_shapes: tuple[tuple[int, ...], ...]  # (N, H, D) of each cache
    num_piece: int  # blocks of PIECE_BYTES

    @staticmethod
    def of(core: EngineCore) -> "_Memory":
        kv, pool = core.runner.kv, core.pool
        shapes = tuple(tuple(c.shape[1:]) for pair in zip(kv.k, kv.v, strict=True) for c in pair)
        num_piece = max(1, PIECE_BYTES * core.config.num_blocks // kv.num_bytes)
        return _Memory(pool, pool.generation, shapes, num_piece)

    def is_of(self, core: EngineCore) -> bool:
        return self.pool is core.pool and self.generation == core.pool.generation

    def shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        return [(num_blocks, *shape) for shape in self.row_shapes]

    def pieces(self, num_blocks: int) -> Iterator[slice]:
        for start in range(0, num_blocks, self.num_piece):
            yield slice(start, min(start + self.num_piece, num_blocks))


def _begin(core: EngineCore, digests: Sequence[bytes]) -> tuple[_Memory, Layout, int]:
    return _Memory.of(core), layout_of(core), len(_chain(core.pool, digests))


def _read(memory: _Memory, core: EngineCore, digests: Sequence[bytes]) -> list[torch.Tensor]:
    blocks = _chain(core.pool, digests) if memory.is_of(core) else []
    return core.on_device("reading KV memory", partial(core.runner.kv.read_blocks, blocks))


def _check(core: EngineCore, saved: SavedPrefix, digests: Sequence[bytes]) -> _Memory:
    if not core.config.reuses_prefixes:
        raise BadParameter("reuses_prefixes", False, "an engine that reuses prefixes")
    memory, pool = _Memory.of(core), core.pool
    _require_own(core, saved, memory)
    found = [block for block in map(pool.find, digests) if block is not None]
    pool.share(found)
    num_free = pool.num_free  # without those that are there already
    pool.give_back(reversed(found))
    num_missing = len(digests) - len(found)
    if num_missing > num_free:
        raise OutOfBlocks(f"{num_missing} KV blocks are needed and {num_free} are free")
    return memory


def _write(
    memory: _Memory, core: EngineCore, digests: Sequence[bytes], rows: Sequence[torch.Tensor]
) -> list[bytes]:
    """Write what is not there yet of one piece and publish it; returns what that was."""
    pool = core.pool
    if not memory.is_of(core):
        raise EngineBusy("the KV memory or the weights changed meanwhile; restore again")
    places = [pool.find(digest) for digest in digests]
    held = [block for block in places if block is not None]
    pool.share(held)  # so that they are not evicted for the others
    try:
        taken = pool.take(places.count(None))
    except OutOfBlocks:
        pool.give_back(reversed(held))
        raise
    missing = [index for index, block in enumerate(places) if block is None]
    fresh = dict(zip(missing, taken, strict=True))
    try:
        own = [cache[missing] for cache in rows]
        core.on_device("writing KV memory", partial(core.runner.kv.write_blocks, taken, own))
        for index, block in fresh.items():
            pool.publish(digests[index], block)
    finally:
        all_blocks = [fresh.get(i, block) for i, block in enumerate(places)]
        pool.give_back(block for block in reversed(all_blocks) if block is not None)
    return [digests[index] for index in missing]


def _withdraw(core: EngineCore, digests: Sequence[bytes]) -> None:
    for digest in digests:
        core.pool.withdraw(digest)


def _chain(pool: BlockPool, digests: Sequence[bytes]) -> list[int]:
    """The blocks of the longest published beginning."""
    blocks: list[int] = []
    for block in map(pool.find, digests):
        if block is None:
            break
        blocks.append(block)
    return blocks


def _require_own(core: EngineCore, saved: SavedPrefix, memory: _Memory) -> None:
    own, theirs = layout_of(core), saved.layout
    for key, expected in own.items():
        if key != "model" and theirs.get(key) != expected:
            raise BadSave(
                f"it was saved with another {key}: {theirs.get(key)!r:.100} of "
                f"{theirs.get('model')!r:.100}, and this server has {expected!r:.100} of "
                f"{own['model']!r:.100}"
            )
    num_tokens, config = len(saved.token_ids), core.config
    if num_tokens > config.context_len:
        raise BadSave(
            f"it holds {num_tokens} tokens, which do not fit into a slot of {config.context_len}"
        )
    num_blocks = num_tokens // config.block_len
    is_whole = num_tokens % config.block_len == 0
    is_shaped = [tuple(r.shape) for r in saved.rows] == memory.shapes(num_blocks)
    is_typed = all(r.dtype is core.model.dtype for r in saved.rows)
    is_known = all(0 <= token < core.model.vocab_size for token in saved.token_ids)
    if not (is_whole and is_shaped and is_typed and is_known):
        raise BadSave("its tokens and its K/V do not belong together")


def _weights_digest(model: Model) -> str:
    """Tells weights apart by a sample of each, whatever the model is called."""
    told, samples = [], []
    for name, weight in model.module.state_dict().items():
        told.append(f"{name} {tuple(weight.shape)} {weight.dtype}")
        step = max(1, weight.numel() // _NUM_SAMPLES)
        if weight.is_contiguous():
            sample = weight.reshape(-1)[::step][:_NUM_SAMPLES]
        else:  # flattening would copy all of it
            places = torch.arange(0, weight.numel(), step, device=weight.device)
            sample = torch.take(weight, places[:_NUM_SAMPLES])
        samples.append(sample.contiguous().view(torch.uint8))
    sha = hashlib.sha256("\n".join(told).encode())
    sha.update(bytes_of(torch.cat(samples).cpu()))
    return sha.hexdigest()
