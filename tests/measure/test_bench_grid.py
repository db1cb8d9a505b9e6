"""Which rows a benchmark has, and that its steps are the scheduler's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphseed.engine import EngineConfig, SamplingParams
from graphseed.engine.blocks import BlockPool
from graphseed.engine.chunks import capacity_of
from graphseed.engine.request import Request
from graphseed.engine.scheduler import Scheduler
from graphseed.measure.bench.grid import BenchTest, Piece, grid

ONE = {
    "pairs": [], "depth_lens": [0], "num_batches": [2048], "num_ubatches": [512],
    "num_parallels": [1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("test", "name"),
    [
        (BenchTest(512, 0), "pp512"),
        (BenchTest(0, 128), "tg128"),
        (BenchTest(512, 128), "pp512+tg128"),
        (BenchTest(512, 0, 4096), "pp512 @ d4096"),
    ],
)
def test_a_row_is_named_as_llama_bench_names_it(test, name):
    assert test.name == name


def test_every_combination_is_a_row_and_groups_hold_prompts_then_decodes_then_pairs():
    groups = grid(
        prompt_lens=[0, 8, 4], new_lens=[2], pairs=[(3, 1)], depth_lens=[0, 16],
        num_batches=[64], num_ubatches=[32, 8], num_parallels=[1, 2],
    )  # fmt: skip
    assert [[test.name for test in group] for group in groups[:1]] == [
        ["pp8", "pp4", "tg2", "pp3+tg1"]
    ]
    settings = [
        (g[0].depth_len, g[0].num_batch, g[0].num_ubatch, g[0].num_parallel) for g in groups
    ]
    assert settings == [
        (0, 64, 32, 1), (0, 64, 32, 2), (0, 64, 8, 1), (0, 64, 8, 2),
        (16, 64, 32, 1), (16, 64, 32, 2), (16, 64, 8, 1), (16, 64, 8, 2),
    ]  # fmt: skip
    for group in groups:
        assert len({(t.depth_len, t.num_batch, t.num_ubatch, t.num_parallel) for t in group}) == 1


def test_lengths_of_zero_give_no_row():
    assert grid(prompt_lens=[0], new_lens=[0], **ONE) == [()]


def test_a_forward_pass_exceeds_neither_batch_nor_ubatch():
    assert BenchTest(512, 0, num_batch=64, num_ubatch=512).pass_len == 64
    assert BenchTest(512, 0, num_batch=2048, num_ubatch=128).pass_len == 128


@given(
    prompt_len=st.integers(1, 150), num_ubatch=st.integers(1, 64), num_parallel=st.integers(1, 5)
)
def test_prompts_share_steps_exactly_as_the_scheduler_packs_them(
    prompt_len, num_ubatch, num_parallel
):
    config = EngineConfig(
        context_len=prompt_len + 1, num_ubatch=num_ubatch, num_parallel=num_parallel,
        reuses_prefixes=False,
    )  # fmt: skip
    scheduler = Scheduler(config, BlockPool(config.num_blocks, config.block_len, False))
    requests = [Request([1] * prompt_len, SamplingParams()) for _ in range(num_parallel)]
    sequences = [scheduler.add(request) for request in requests]
    expected = []
    while (batch := scheduler.next()) is not None:
        scheduler.submitted(batch)
        pieces = tuple(
            Piece(sequences.index(p.sequence), p.start, p.num_tokens) for p in batch.parts
        )
        expected.append((pieces, batch.capacity))
    test = BenchTest(prompt_len, 0, num_ubatch=num_ubatch, num_parallel=num_parallel)
    steps = list(test.timed_steps())
    # An engine that is sized for this test alone pads them alike.
    capacities = [capacity_of(sum(p.num_tokens for p in step), test.capacity) for step in steps]
    assert list(zip(steps, capacities, strict=True)) == expected


def test_a_decode_step_takes_one_token_of_every_sequence_behind_depth_and_prompt():
    test = BenchTest(3, 2, depth_len=5, num_parallel=2)
    *prompt, first, second = test.timed_steps()
    assert [p for step in prompt for p in step] == [Piece(0, 5, 3), Piece(1, 5, 3)]
    assert first == (Piece(0, 8, 1), Piece(1, 8, 1))
    assert second == (Piece(0, 9, 1), Piece(1, 9, 1))
    assert test.num_tokens == 10 and test.context_len >= 10
