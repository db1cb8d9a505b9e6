"""The plan is a pure rule over capacities."""

from dataclasses import replace

import pytest

from graphseed.models.kernels.plan import AttentionPlan, next_power_of_2, plan_attention

SMS = 132  # an H200
MODELS = {
    "smollm2-135m": (9, 3, 64),
    "llama3-8b": (32, 8, 128),
    "gemma3-270m": (4, 1, 256),
    "phi3-mini": (32, 32, 96),
    "gpt-oss": (64, 8, 64),
    "falcon-7b": (71, 1, 64),
}


@pytest.mark.parametrize("heads", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("num_tokens", [1, 16, 48, 512, 4096])
def test_a_plan_holds_whole_groups_within_the_workspace(
    heads: tuple[int, int, int], num_tokens: int
) -> None:
    q_heads, kv_heads, head_dim = heads
    for num_seqs in (1, 8, 64):
        plan = plan_attention(num_tokens, num_seqs, *heads, SMS, 131_072)
        assert plan.block_rows >= q_heads // kv_heads
        floats = num_tokens * q_heads * plan.num_splits * (head_dim + 1)
        assert plan.num_splits == 1 or floats * 4 <= 32 << 20


@pytest.mark.parametrize("heads", MODELS.values(), ids=MODELS)
def test_a_prompt_chunk_fills_the_device_in_one_wave(heads: tuple[int, int, int]) -> None:
    q_heads, kv_heads, _ = heads
    plan = plan_attention(512, 8, *heads, SMS, 8192)
    row_blocks = -(-512 // (plan.block_rows // (q_heads // kv_heads)))
    programs = row_blocks * kv_heads * plan.num_splits
    assert plan.num_splits == 1 or SMS < programs <= 2 * SMS


def test_decode_takes_one_group_a_program_and_splits_the_keys() -> None:
    plan = plan_attention(1, 1, 9, 3, 64, SMS, 8192)
    assert plan.block_rows == 16
    assert plan.num_splits == 32


def test_few_keys_are_not_split_below_what_a_split_is_worth() -> None:
    assert plan_attention(1, 1, 9, 3, 64, SMS, 128).num_splits == 1
    assert plan_attention(1, 1, 9, 3, 64, SMS, 512).num_splits == 4


def test_the_plan_of_equal_capacities_is_equal() -> None:
    sizes = (512, 8, 9, 3, 64, SMS, 8192)
    assert plan_attention(*sizes) == plan_attention(*sizes)


def test_ints_are_the_fields_in_order() -> None:
    plan = AttentionPlan(128, 64, 3, 8, 2)
    assert plan.as_ints() == (128, 64, 3, 8, 2)
    assert AttentionPlan(*plan.as_ints()) == plan


def test_wide_elements_shrink_tiles_and_keep_the_splits() -> None:
    plan = plan_attention(512, 8, 32, 8, 128, SMS, 8192)
    assert plan.for_itemsize(2, 4) is plan
    wide = plan.for_itemsize(4, 4)
    assert wide.block_rows < plan.block_rows
    assert wide.block_kv < plan.block_kv
    assert wide.num_splits == plan.num_splits
    assert plan.for_itemsize(4, 64).block_rows == 64  # a group stays in one program


@pytest.mark.parametrize("value, expected", [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_2_is_the_smallest_not_below(value: int, expected: int) -> None:
    assert next_power_of_2(value) == expected


@pytest.mark.parametrize(
    "field, value",
    [("block_rows", 48), ("block_kv", 8), ("num_splits", 0), ("num_warps", 3), ("num_stages", 9)],
)
def test_a_plan_no_kernel_takes_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        replace(AttentionPlan(64, 64, 1, 4, 2), **{field: value})


def test_capacities_that_mean_nothing_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_seqs is 0"):
        plan_attention(1, 0, 9, 3, 64, SMS, 128)
    with pytest.raises(ValueError, match="9 query heads do not divide into 2"):
        plan_attention(1, 1, 9, 2, 64, SMS, 128)
