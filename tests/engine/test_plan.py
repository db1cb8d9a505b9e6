"""The pure parts: chunks, blocks, configuration, sampling."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphseed.engine import BadParameter, EngineConfig, NotFinite, SamplingParams
from graphseed.engine.blocks import BlockPool, BlockTable, OutOfBlocks
from graphseed.engine.chunks import capacity_of, plan_chunks, rungs
from graphseed.engine.config import resolve
from graphseed.engine.sampler import sample


def test_the_ladder_goes_on_as_it_began():
    first = [rung for rung, _ in zip(rungs(), range(16), strict=False)]
    assert first == [
        16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "ubatch", "capacity"),
    [(1, 512, 16), (16, 512, 16), (17, 512, 32), (385, 512, 512), (1, 1, 1), (17, 17, 17),
     (10, 17, 16), (100, 100, 100), (600, 700, 700), (513, 2048, 768)],
)  # fmt: skip
def test_a_chunk_is_padded_to_its_rung_at_most_the_ubatch(tokens, ubatch, capacity):
    assert capacity_of(tokens, ubatch) == capacity


@given(st.integers(1, 5000), st.integers(1, 700), st.data())
def test_chunks_cover_the_uncached_tokens_in_order(num_tokens, num_ubatch, data):
    num_cached = data.draw(st.integers(0, num_tokens - 1))
    chunks = plan_chunks(num_tokens, num_ubatch, num_cached)
    assert [chunk.start for chunk in chunks] == list(range(num_cached, num_tokens, num_ubatch))
    assert chunks[-1].end == num_tokens
    assert all(a.end == b.start for a, b in zip(chunks, chunks[1:], strict=False))
    assert all(chunk.num_tokens <= chunk.capacity <= max(num_ubatch, 1) for chunk in chunks)


def test_an_8192_token_prompt_is_sixteen_chunks_of_one_capacity():
    assert {chunk.capacity for chunk in plan_chunks(8192, 512)} == {512}
    assert len(plan_chunks(8192, 512)) == 16


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


def test_an_automatic_context_is_the_models_when_it_fits(caplog):
    sizes = {"model_context_len": 4096, "kv_bytes_per_token": 1000}
    with caplog.at_level(logging.INFO):
        assert resolve(EngineConfig(), free_bytes=1 << 30, **sizes).context_len == 4096
    assert "the model's 4096 tokens" in caplog.text


def test_an_automatic_context_is_cut_to_half_of_the_free_memory_and_says_so(caplog):
    config = resolve(
        EngineConfig(), model_context_len=4096, kv_bytes_per_token=1000, free_bytes=2_000_000
    )
    assert config.context_len == 1000
    assert "set to 1000 of the model's 4096 tokens" in caplog.text


def test_a_context_above_the_models_is_allowed_and_warned_of(caplog):
    config = EngineConfig(context_len=5000)
    resolved = resolve(config, model_context_len=4096, kv_bytes_per_token=1, free_bytes=1)
    assert resolved is config
    assert "above the 4096 tokens" in caplog.text


def test_cached_tokens_must_leave_one_to_run():
    with pytest.raises(BadParameter, match="cached tokens is 4"):
        plan_chunks(4, 16, 4)


LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.9, -1.0])


def frequencies(params, draws=3000):
    tokens = [sample(LOGITS, params, position) for position in range(draws)]
    return np.bincount(tokens, minlength=5) / draws


def test_greedy_takes_the_largest():
    assert sample(LOGITS, SamplingParams(), 7) == 1


def test_a_draw_depends_on_seed_position_and_logits_alone():
    params = SamplingParams(temperature=1.0, seed=5)
    draws = [sample(LOGITS, params, position) for position in range(50)]
    assert draws == [sample(LOGITS.clone(), params, position) for position in range(50)]
    other = SamplingParams(temperature=1.0, seed=6)
    assert draws != [sample(LOGITS, other, position) for position in range(50)]


def test_draws_follow_the_softmax():
    # 3,000 draws: three standard deviations of a frequency are at most 0.028.
    want = torch.softmax(LOGITS.double() / 0.7, 0).numpy()
    assert np.abs(frequencies(SamplingParams(temperature=0.7)) - want).max() < 0.03


def test_the_smallest_temperature_is_greedy():
    params = SamplingParams(temperature=1e-308)
    assert {sample(LOGITS, params, position) for position in range(20)} == {1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
def test_logits_that_are_no_numbers_are_an_error(value, params):
    logits = torch.full((5,), value)
    with pytest.raises(NotFinite, match="after position 3 is"):
        sample(logits, SamplingParams(**params), 3)


def test_equal_logits_are_taken_by_rising_id():
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0])
    assert sample(logits, SamplingParams(), 0) == 1
    draws = {sample(logits, SamplingParams(temperature=1e-9), p) for p in range(50)}
    assert draws == {1, 2, 3}


@pytest.mark.parametrize(
    ("params", "kept"),
    [({"top_k": 2}, {1, 3}), ({"top_p": 0.6}, {1, 3}), ({"top_p": 0.1}, {1}),
     ({"min_p": 0.5}, {1, 3}), ({"top_k": 1}, {1}), ({"top_k": 4, "min_p": 0.1}, {1, 2, 3})],
)  # fmt: skip
def test_filters_keep_the_most_likely(params, kept):
    seen = frequencies(SamplingParams(temperature=2.0, **params), draws=400)
    assert set(np.flatnonzero(seen)) == kept
