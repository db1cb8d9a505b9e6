"""The operator on a CPU against a float64 reference, what it refuses, and what Meta does."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from graphseed.models.kernels.operator import paged_attention
from tests.models.paged_reference import (
    Case,
    Shape,
    expected_caches,
    make_case,
    reference,
    same_bytes,
)

PLAN = (16, 16, 1, 4, 1)
# float32 against float64: sums of a few hundred products of about 1, in another order.
TOLERANCE = 2e-6

ROWS, KV_LENS = [5, 0, 1, 23], [40, 0, 70, 23]
SHAPES = {
    "plain": Shape(),
    "one_head_a_group": Shape(num_q_heads=2, num_kv_heads=2),
    "groups_of_four_and_d256": Shape(num_q_heads=4, num_kv_heads=1, head_dim=256),
    "groups_of_eight_and_d96": Shape(num_q_heads=8, num_kv_heads=1, head_dim=96),
    "blocks_of_32": Shape(block_size=32),
    "window": Shape(window=7),
    "window_of_one": Shape(window=1),
    "window_wider_than_all": Shape(window=500),
    "soft_cap": Shape(soft_cap=2.0),
    "sinks": Shape(has_sinks=True),
    "all_at_once": Shape(window=20, soft_cap=3.0, has_sinks=True, block_size=32),
}


def run(case: Case) -> torch.Tensor:
    out = case.poisoned_out()
    paged_attention(*case.operands(out), PLAN)
    return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ragged_sequences_match_the_reference(shape: Shape) -> None:
    case = make_case(shape, ROWS, KV_LENS, num_pads=7)
    want, want_caches = reference(case), expected_caches(case)
    out = run(case)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE, rtol=0)
    assert not out[case.num_rows :].any(), "padded rows must be exactly zero"
    assert same_bytes(case.k_cache, want_caches[0])
    assert same_bytes(case.v_cache, want_caches[1])


@pytest.mark.parametrize("shape", [Shape(), Shape(has_sinks=True, window=9)])
def test_bfloat16_matches_the_reference(shape: Shape) -> None:
    # bfloat16 weights and results carry 2**-9 of themselves.
    case = make_case(replace(shape, dtype=torch.bfloat16), ROWS, KV_LENS)
    want = reference(case)
    torch.testing.assert_close(run(case).double(), want, atol=2e-2, rtol=0)


@pytest.mark.parametrize("window", [0, 300])
def test_prompts_of_several_parts_match_the_reference(window: int) -> None:
    shape = Shape(num_q_heads=1, num_kv_heads=1, head_dim=16, window=window)
    case = make_case(shape, [600], [700])
    want = reference(case)
    torch.testing.assert_close(run(case).double(), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", [Shape(), Shape(window=11), Shape(has_sinks=True, soft_cap=4.0)])
def test_chunks_of_a_prompt_equal_one_shot(shape: Shape) -> None:
    # Not bitwise: the chunks cut the sums over keys in other places.
    whole = make_case(shape, [50], [50])
    want = run(whole)
    chunked = make_case(shape, [50], [50])
    outs = []
    for begin, end in ((0, 16), (16, 32), (32, 50)):
        part = replace(
            chunked,
            rows=[end - begin],
            q=chunked.q[begin:end],
            k=chunked.k[begin:end],
            v=chunked.v[begin:end],
            kv_indices=chunked.kv_indices[begin:end],
            seq_starts=torch.tensor([0, end - begin], dtype=torch.int32),
            kv_lens=torch.tensor([end], dtype=torch.int32),
        )
        outs.append(run(part))
    torch.testing.assert_close(torch.cat(outs), want, atol=TOLERANCE, rtol=0)
    assert same_bytes(chunked.k_cache, whole.k_cache)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=5),
    num_pads=st.integers(0, 5),
    window=st.integers(0, 25),
    has_sinks=st.booleans(),
)
def test_any_lengths_match_the_reference(
    lengths: list[tuple[int, int]], num_pads: int, window: int, has_sinks: bool
) -> None:
    rows = [num_rows for num_rows, _ in lengths]
    kv_lens = [num_rows + past if num_rows else 0 for num_rows, past in lengths]
    shape = Shape(2, 1, 16, window=window, has_sinks=has_sinks)
    case = make_case(shape, rows, kv_lens, num_pads)
    want = reference(case)
    out = run(case)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE, rtol=0)
    assert not out[case.num_rows :].any()


def test_the_same_step_gives_the_same_bytes() -> None:
    outs = [run(make_case(Shape(window=20), ROWS, KV_LENS, num_pads=3)) for _ in range(3)]
    assert same_bytes(outs[0], outs[1])
    assert same_bytes(outs[0], outs[2])


def test_padding_changes_no_byte_of_a_real_row() -> None:
    case = make_case(Shape(), [5, 8], [40, 8], num_pads=11)
    padded = run(case)
    real = case.num_rows
    bare = replace(
        case,
        q=case.q[:real],
        k=case.k[:real],
        v=case.v[:real],
        kv_indices=case.kv_indices[:real],
    )
    assert same_bytes(run(bare), padded[:real])


def test_a_step_without_tokens_does_nothing() -> None:
    assert run(make_case(Shape(), [0], [0])).shape == (0, 6, 64)


BREAKS: dict[str, tuple[Callable[[Case], dict[str, object]], str]] = {
    "value_heads": (lambda c: {"v": c.v[..., :32]}, r"v is shape \[6, 2, 32\]; expected \[6, 2, 6"),
    "query_heads": (lambda c: {"q": c.q[:, :5]}, "5 heads; expected a multiple of the 2 K/V heads"),
    "type": (lambda c: {"k": c.k.half()}, "k is torch.float16; expected the type of q"),
    "index_type": (lambda c: {"kv_lens": c.kv_lens.long()}, "kv_lens is torch.int64.*int32"),
    "starts": (lambda c: {"seq_starts": c.seq_starts[:1]}, r"seq_starts is shape \[1\]"),
    "query_strides": (lambda c: {"q": c.q.mT.contiguous().mT}, "q is strides.*last dimension"),
    "cache_strides": (lambda c: {"k_cache": c.k_cache.mT.contiguous().mT}, "k_cache is strides"),
    "block_size": (
        lambda c: {"k_cache": c.k_cache[:, :8].contiguous()},
        "blocks of 8; expected a block size that is a power of two >= 16",
    ),
    "dimensions": (lambda c: {"q": c.q[None]}, r"is \(4, 4, 2\); expected 3, 4 and 2 dimensions"),
    "sinks": (lambda c: {"sinks": torch.zeros(5)}, r"sinks is shape \[5\].*\[6\]"),
    "scale": (lambda c: {"shape": replace(c.shape, scale=0.0)}, "scale is 0.0"),
    "cap": (lambda c: {"shape": replace(c.shape, soft_cap=-1.0)}, "soft_cap is -1.0"),
    "window": (lambda c: {"shape": replace(c.shape, window=-1)}, "window is -1"),
}


@pytest.mark.parametrize("change, message", BREAKS.values(), ids=BREAKS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operands_that_disagree_are_refused_by_name(
    change: Callable[[Case], dict[str, object]], message: str, device: str
) -> None:
    case = make_case(Shape(), [6], [6])
    broken = replace(case, **change(case)).to(device)
    with pytest.raises(ValueError, match=message):
        paged_attention(*broken.operands(torch.empty_like(case.q.contiguous()).to(device)), PLAN)


def test_a_plan_of_other_length_is_refused() -> None:
    case = make_case(Shape(), [6], [6])
    with pytest.raises(ValueError, match=r"plan is \[16, 16\]"):
        paged_attention(*case.operands(case.poisoned_out()), (16, 16))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq_starts": [1, 6]}, r"seq_starts is \[1, 6\]; it must begin at 0"),
        ({"seq_starts": [0, 7]}, r"seq_starts is \[0, 7\].*6 tokens"),
        ({"seq_starts": [0, -1]}, "never decrease"),
        ({"kv_lens": [5]}, r"kv_lens\[0\] is 5; with 6 rows"),
        ({"kv_lens": [33]}, r"kv_lens\[0\] is 33.*room for 32 keys"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_by_value(
    change: dict[str, list[int]], message: str
) -> None:
    tensors = {name: torch.tensor(v, dtype=torch.int32) for name, v in change.items()}
    broken = replace(make_case(Shape(), [6], [6]), **tensors)
    with pytest.raises(ValueError, match=message):
        run(broken)


def test_a_fake_run_records_one_call_and_touches_nothing() -> None:
    case = make_case(Shape(), ROWS, KV_LENS)
    out = case.poisoned_out()
    before = out.clone(), case.k_cache.clone(), case.v_cache.clone()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        assert paged_attention(*case.operands(out), PLAN) is None
    after = out, case.k_cache, case.v_cache
    assert all(same_bytes(a, b) for a, b in zip(after, before, strict=True))


def test_the_schema_names_what_is_written() -> None:
    written = [a.name for a in paged_attention._schema.arguments if a.alias_info is not None]
    assert written == ["k_cache", "v_cache", "out"]
    assert not paged_attention._schema.returns
