"""The pure parts: chunks, configuration."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphseed.engine import BadParameter, EngineConfig
from graphseed.engine.chunks import capacity_of, plan_chunks, rungs
from graphseed.engine.config import resolve


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
