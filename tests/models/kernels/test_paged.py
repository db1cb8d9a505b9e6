"""The Triton kernels against a float64 reference: interpreted, or on a GPU where there is one."""

from dataclasses import replace

import pytest
import torch

from tests.models.paged_reference import (
    Case,
    Shape,
    expected_caches,
    make_case,
    reference,
    same_bytes,
)

launch = pytest.importorskip("graphseed.models.kernels.launch")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# float32 against float64: sums of a few hundred products of about 1, in another order.
TOLERANCE = 2e-6

ROWS, KV_LENS = [5, 0, 1, 23], [40, 0, 70, 23]
CASES = {
    "plain": (Shape(), 2),
    "one_head_a_group": (Shape(num_q_heads=2, num_kv_heads=2), 1),
    "groups_of_eight_and_d96": (Shape(num_q_heads=8, num_kv_heads=1, head_dim=96), 2),
    "groups_of_four_and_d256": (Shape(num_q_heads=4, num_kv_heads=1, head_dim=256), 1),
    "window": (Shape(window=7), 1),
    "window_split": (Shape(window=20), 2),
    "window_wider_than_all": (Shape(window=500), 1),
    "soft_cap": (Shape(soft_cap=2.0), 1),
    "sinks": (Shape(has_sinks=True), 1),
    "sinks_split": (Shape(has_sinks=True, num_kv_heads=1), 5),
    "all_at_once": (Shape(window=20, soft_cap=3.0, has_sinks=True, block_size=32), 5),
    "more_splits_than_keys": (Shape(num_q_heads=3, num_kv_heads=1, head_dim=16), 9),
}


def run(case: Case, num_splits: int, block_rows: int = 16, block_kv: int = 16) -> torch.Tensor:
    moved = case.to(DEVICE)
    out = moved.poisoned_out()
    plan = (block_rows, block_kv, num_splits, 4, 1)
    launch.paged_attention_cuda(*moved.operands(out), plan)
    case.k_cache, case.v_cache = moved.k_cache.cpu(), moved.v_cache.cpu()
    return out.cpu()


@pytest.mark.parametrize("shape, num_splits", CASES.values(), ids=CASES)
def test_ragged_sequences_match_the_reference(shape: Shape, num_splits: int) -> None:
    case = make_case(shape, ROWS, KV_LENS, num_pads=7)
    want, want_caches = reference(case), expected_caches(case)
    out = run(case, num_splits)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE, rtol=0)
    assert not out[case.num_rows :].any(), "padded rows must be exactly zero"
    assert same_bytes(case.k_cache, want_caches[0])
    assert same_bytes(case.v_cache, want_caches[1])


@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_half_precision_matches_the_reference(num_splits: int) -> None:
    # float16 weights and results carry 2**-11 of themselves; the interpreter has no bfloat16 dot.
    case = make_case(Shape(dtype=torch.float16, has_sinks=True), [3, 2], [3, 50], num_pads=1)
    want = reference(case)
    torch.testing.assert_close(run(case, num_splits).double(), want, atol=3e-3, rtol=0)


@pytest.mark.parametrize("block_rows, block_kv", [(64, 16), (16, 64), (32, 32)])
def test_every_tile_size_matches_the_reference(block_rows: int, block_kv: int) -> None:
    case = make_case(Shape(window=33), [30, 1], [70, 90], num_pads=2)
    want = reference(case)
    out = run(case, 2, block_rows, block_kv)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE, rtol=0)


def test_keys_far_longer_than_rows_match_the_reference() -> None:
    case = make_case(Shape(num_q_heads=3, num_kv_heads=1, head_dim=16), [2], [700])
    want = reference(case)
    out = run(case, 5, block_kv=64)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE, rtol=0)


def test_more_sequences_than_one_search_holds_match_the_reference() -> None:
    rows = [1 if seq % 3 == 0 else 0 for seq in range(150)]
    kv_lens = [2 if num_rows else 0 for num_rows in rows]
    case = make_case(Shape(num_q_heads=1, num_kv_heads=1, head_dim=16), rows, kv_lens, num_pads=3)
    want = reference(case)
    torch.testing.assert_close(run(case, 1).double(), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_step_of_padding_alone_is_zero_and_writes_no_cache(num_splits: int) -> None:
    case = make_case(Shape(has_sinks=True), [0, 0], [0, 0], num_pads=9)
    before = case.k_cache.clone(), case.v_cache.clone()
    out = run(case, num_splits)
    assert not out.any()
    assert same_bytes(case.k_cache, before[0])
    assert same_bytes(case.v_cache, before[1])


def test_padding_and_other_blocks_change_no_byte_of_a_real_row() -> None:
    bare = make_case(Shape(), [5, 8], [40, 8], seed=1)
    padded = make_case(Shape(), [5, 8, 0], [40, 8, 0], num_pads=11, seed=2)
    real = bare.num_rows
    padded.q[:real] = bare.q
    padded.k[:real], padded.v[:real] = bare.k, bare.v
    for seq, kv_len in enumerate(bare.kv_lens_list):  # the same past, in the other's blocks
        for pos in range(kv_len - bare.rows[seq]):
            into, block = divmod(pos, 16)[::-1]
            mine, theirs = (int(c.block_tables[seq, block]) for c in (bare, padded))
            padded.k_cache[theirs, into] = bare.k_cache[mine, into]
            padded.v_cache[theirs, into] = bare.v_cache[mine, into]
    assert same_bytes(run(bare, 2), run(padded, 2)[:real])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # how tanh reaches 1 exactly
def test_soft_caps_far_below_the_scores_saturate() -> None:
    shape = Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, soft_cap=0.5, scale=8.0)
    case = make_case(shape, [6], [40])
    want = reference(case)
    torch.testing.assert_close(run(case, 1).double(), want, atol=TOLERANCE, rtol=0)


def test_strides_that_allow_no_wide_load_are_right() -> None:
    case = make_case(replace(Shape(), num_q_heads=2, num_kv_heads=1, head_dim=20), [6], [40])
    want = reference(case)
    torch.testing.assert_close(run(case, 2).double(), want, atol=TOLERANCE, rtol=0)
