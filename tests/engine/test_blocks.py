"""Blocks: handed out once, counted, found again by the tokens they hold."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphseed.engine.blocks import BlockPool, BlockTable, OutOfBlocks

LEN = 16


def tokens_of(num_tokens, first=0):
    return list(range(first, first + num_tokens))


def written(pool, token_ids, max_blocks=64):
    """A table that ran all of `token_ids` and published them."""
    table = BlockTable(pool, max_blocks)
    table.match_prefix(token_ids)
    table.grow(len(token_ids))
    table.publish(token_ids, len(token_ids))
    return table


def cached(pool, token_ids):
    """Tokens that a new table would find; nothing is held afterwards."""
    table = BlockTable(pool, 64)
    found = table.match_prefix(token_ids)
    table.close()
    return found


@given(st.lists(st.integers(1, 12), max_size=20), st.randoms())
def test_blocks_are_handed_out_once_and_come_back(sizes, random):
    pool, held = BlockPool(40, 16), []
    for size in sizes:
        try:
            held.append(pool.take(size))
        except OutOfBlocks:
            assert size > pool.num_free
            if held:
                pool.give_back(held.pop(random.randrange(len(held))))
        taken = [block for blocks in held for block in blocks]
        assert len(set(taken)) == len(taken) and 0 not in taken
        assert pool.num_free + len(taken) == 39
    for blocks in held:
        pool.give_back(blocks)
    assert pool.num_free == 39


def test_a_block_that_was_not_taken_cannot_come_back():
    pool = BlockPool(4, 16)
    with pytest.raises(ValueError, match="block 1 was not taken"):
        pool.give_back([1])
    with pytest.raises(ValueError, match="block 0"):
        pool.give_back([0])
    with pytest.raises(ValueError, match="block 4"):
        pool.give_back([4])


def test_a_table_maps_positions_to_its_blocks_and_grows_by_need():
    pool = BlockPool(10, 16)
    pool.take(3)
    table = BlockTable(pool, 8)
    table.grow(33)
    assert table.ids.tolist() == [4, 5, 6]
    assert table.kv_indices(14, 18).tolist() == [4 * 16 + 14, 4 * 16 + 15, 5 * 16, 5 * 16 + 1]
    assert table.kv_indices(32, 33).dtype == np.int32
    with pytest.raises(OutOfBlocks):
        table.grow(16 * 8)
    assert table.num_blocks == 3
    table.close()
    table.close()
    assert pool.num_free == 6


def test_a_table_does_not_grow_beyond_its_context_and_takes_nothing_then():
    pool = BlockPool(10, LEN)
    table = BlockTable(pool, 2)
    with pytest.raises(ValueError, match="33 tokens need 3 KV blocks .* at most 2"):
        table.grow(33)
    assert pool.num_free == 9 and table.num_blocks == 0


@pytest.mark.parametrize(
    ("num_tokens", "found"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (50, 48), (90, 48)]
)
def test_a_prefix_is_whole_blocks_and_leaves_a_token_to_run(num_tokens, found):
    pool = BlockPool(20, LEN)
    first = written(pool, tokens_of(60))
    table = BlockTable(pool, 64)
    # From 60 on other tokens than the first sequence's, which has none there.
    assert table.match_prefix(tokens_of(num_tokens)) == found
    assert table.ids.tolist() == first.ids[: found // LEN].tolist()
    assert pool.num_free == 19 - 4  # shared, not taken


def test_a_prefix_ends_at_the_first_block_with_another_token():
    pool = BlockPool(20, LEN)
    written(pool, tokens_of(64))
    prompt = tokens_of(64)
    prompt[20] = 7
    assert cached(pool, prompt) == 16
    prompt[0] = 7  # everything behind it is another chain, though the tokens are the same
    assert cached(pool, prompt) == 0


def test_a_shared_block_comes_back_with_its_last_holder_and_stays_findable():
    pool = BlockPool(10, LEN)
    one = written(pool, tokens_of(40))
    two = written(pool, tokens_of(40))
    assert two.ids[:2].tolist() == one.ids[:2].tolist() and two.ids[2] != one.ids[2]
    assert pool.num_free == 9 - 4
    one.close()
    assert pool.num_free == 9 - 3
    two.close()
    assert pool.num_free == 9
    assert cached(pool, tokens_of(40)) == 32


def test_free_blocks_go_first_and_the_least_recently_held_chain_goes_last_block_first():
    pool = BlockPool(9, LEN)
    old, new = tokens_of(32, 100), tokens_of(32, 200)
    written(pool, old).close()
    written(pool, new).close()
    pool.take(4)
    assert (cached(pool, [*old, 1]), cached(pool, [*new, 1])) == (32, 32)
    pool.take(1)
    # Looking made `new` the most recent again.
    assert (cached(pool, [*new, 1]), cached(pool, [*old, 1])) == (32, 16)
    pool.take(1)  # of `new`: the look at `old` came last
    assert (cached(pool, [*old, 1]), cached(pool, [*new, 1])) == (16, 16)
    assert pool.num_free == 2
    pool.take(2)
    assert (cached(pool, [*old, 1]), cached(pool, [*new, 1])) == (0, 0)


def test_a_held_prefix_is_never_evicted():
    pool = BlockPool(6, LEN)
    written(pool, tokens_of(32)).close()
    table = BlockTable(pool, 8)
    assert table.match_prefix(tokens_of(33)) == 32
    assert pool.num_free == 3
    with pytest.raises(OutOfBlocks, match="4 KV blocks were asked for and 3 of 5"):
        pool.take(4)
    assert not set(pool.take(3)) & set(table.ids.tolist())


def test_a_chain_that_is_published_already_keeps_its_first_block():
    pool = BlockPool(10, LEN)
    one, two = BlockTable(pool, 8), BlockTable(pool, 8)
    tokens = tokens_of(32)
    one.grow(32)
    two.grow(32)  # both ran at the same time
    one.publish(tokens, 32)
    two.publish(tokens, 32)
    three = BlockTable(pool, 8)
    assert three.match_prefix([*tokens, 1]) == 32
    assert three.ids.tolist() == one.ids.tolist()
    kept = one.ids.tolist()
    two.close()
    one.close()
    three.close()
    assert BlockTable(pool, 8).match_prefix([*tokens, 1]) == 32
    assert pool.num_free == 7 and not set(pool.take(7)) & set(kept)


def test_only_whole_written_blocks_are_published_as_the_sequence_goes_on():
    pool = BlockPool(10, LEN)
    table = BlockTable(pool, 8)
    tokens = tokens_of(20)
    table.grow(20)
    table.publish(tokens, 15)
    assert cached(pool, tokens_of(90)) == 0
    table.publish(tokens, 20)
    assert cached(pool, tokens_of(90)) == 16
    tokens += tokens_of(20, 20)
    table.grow(40)
    table.publish(tokens, 40)
    assert cached(pool, tokens_of(90)) == 32
    with pytest.raises(ValueError, match=r"41 tokens .* 40 token ids .* holds 48"):
        table.publish(tokens, 41)


def test_nothing_is_found_when_prefixes_are_not_reused():
    pool = BlockPool(10, LEN, reuses_prefixes=False)
    table = written(pool, tokens_of(64))
    assert cached(pool, tokens_of(64)) == 0
    table.close()
    assert cached(pool, tokens_of(64)) == 0 and pool.num_free == 9


def test_a_prefix_is_matched_on_an_empty_table_only():
    table = written(BlockPool(10, LEN), tokens_of(20))
    with pytest.raises(ValueError, match="the table holds 2 blocks"):
        table.match_prefix(tokens_of(20))


def test_forgetting_drops_held_and_idle_chains_and_what_open_tables_would_publish():
    pool = BlockPool(12, LEN)
    written(pool, tokens_of(32, 500)).close()
    table = BlockTable(pool, 8)
    tokens = tokens_of(48)
    table.grow(48)
    table.publish(tokens, 32)
    pool.forget()
    table.publish(tokens, 48)  # written over K/V that was lost
    assert cached(pool, tokens_of(64)) == cached(pool, tokens_of(64, 500)) == 0
    assert pool.num_free == 11 - 3
    fresh = written(pool, tokens_of(32))
    assert cached(pool, tokens_of(64)) == 32
    fresh.close()
    table.close()
    assert pool.num_free == 11
    written(pool, tokens)
    assert cached(pool, tokens_of(64)) == 48
    assert len(set(pool.take(8))) == 8


def test_a_table_that_is_used_again_for_other_tokens_finds_those():
    pool = BlockPool(10, LEN)
    table = written(pool, tokens_of(32))
    table.close()
    other = tokens_of(32, 900)
    assert table.match_prefix(other) == 0
    table.grow(32)
    table.publish(other, 32)
    assert cached(pool, [*other, 1]) == cached(pool, [*tokens_of(32), 1]) == 32


class Model:
    """What the pool should do, slowly: chains by their tokens, idle ones in order of release."""

    def __init__(self, num_blocks):
        self.num_free = num_blocks  # neither held nor idle
        self.holders = {}  # published chain -> tables that hold it
        self.idle = []

    def find(self, tokens):
        chains = [tuple(tokens[: end * LEN]) for end in range(1, (len(tokens) - 1) // LEN + 1)]
        found = []
        for chain in chains:
            if chain not in self.holders:
                break
            found.append(chain)
        return found

    def hold(self, chains):
        for chain in chains:
            if not self.holders[chain]:
                self.idle.remove(chain)
            self.holders[chain] += 1

    def take(self, count):
        if count > self.num_free + len(self.idle):
            return False
        for _ in range(count):
            if self.num_free:
                self.num_free -= 1
            else:
                del self.holders[self.idle.pop(0)]
        return True

    def drop(self, blocks):
        """Blocks of a table: the chain each is published as, or None."""
        for chain in reversed(blocks):
            if chain is None:
                self.num_free += 1
                continue
            self.holders[chain] -= 1
            if not self.holders[chain]:
                self.idle.append(chain)


PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 70), st.integers(0, 1), st.integers(1, 40))


@given(st.lists(st.tuples(st.booleans(), PROMPTS, st.randoms()), max_size=60))
def test_prefixes_are_found_held_and_evicted_as_a_simple_model_says(ops):
    pool, model, tables = BlockPool(13, LEN), Model(12), []
    for is_open, (family, num_shared, kind, num_own), random in ops:
        if is_open or not tables:
            prompt = [family] * num_shared + [10 + kind] * num_own
            table, chains = BlockTable(pool, 8), model.find(prompt)
            assert table.match_prefix(prompt) == len(chains) * LEN
            model.hold(chains)
            num_new = -(-len(prompt) // LEN) - len(chains)
            if not model.take(num_new):
                with pytest.raises(OutOfBlocks):
                    table.grow(len(prompt))
                table.close()
                model.drop(chains)
                continue
            table.grow(len(prompt))
            table.publish(prompt, len(prompt))
            blocks = list(chains) + [None] * num_new
            for end in range(len(chains), len(prompt) // LEN):
                chain = tuple(prompt[: (end + 1) * LEN])
                if chain not in model.holders:
                    model.holders[chain], blocks[end] = 1, chain
            tables.append((table, blocks))
        else:
            table, blocks = tables.pop(random.randrange(len(tables)))
            table.close()
            model.drop(blocks)
        assert pool.num_free == model.num_free + len(model.idle)
    for table, _ in tables:
        table.close()
    assert pool.num_free == 12


def test_publishing_a_long_sequence_costs_what_is_new():
    pool = BlockPool(131072 // LEN + 1, LEN)
    table = BlockTable(pool, 131072 // LEN)
    tokens = tokens_of(131072)
    table.grow(131072)
    table.publish(tokens, 131072 - 512)
    laps = []
    for _ in range(5):
        start = time.perf_counter()
        table.publish(tokens, 131072 - 512)
        laps.append(time.perf_counter() - start)
    # A few microseconds; hashing everything again would take 10 ms.
    assert min(laps) < 1e-3
