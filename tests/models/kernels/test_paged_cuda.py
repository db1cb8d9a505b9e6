"""The operator on a GPU: bfloat16 against the float64 reference, real plans, and inside a graph."""

import pytest
import torch

from graphseed.models.kernels.operator import paged_attention
from graphseed.models.kernels.plan import plan_attention
from tests.models.paged_reference import Case, Shape, make_case, reference, same_bytes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BF16 = torch.bfloat16
SHAPES = {
    "smollm2": Shape(9, 3, 64, dtype=BF16),
    "llama3": Shape(8, 2, 128, dtype=BF16),
    "gemma3": Shape(4, 1, 256, dtype=BF16, window=48, scale=0.0625),
    "gemma2": Shape(4, 2, 256, dtype=BF16, window=48, soft_cap=5.0, scale=0.0625),
    "gpt_oss": Shape(16, 2, 64, dtype=BF16, window=33, has_sinks=True),
    "phi3": Shape(4, 4, 96, dtype=BF16),
    "half": Shape(6, 2, 64, dtype=torch.float16),
    "single": Shape(6, 2, 128),
    "wide_single": Shape(4, 1, 256),
}
STEPS = {
    "ragged": ([5, 0, 1, 23, 0], [40, 0, 700, 23, 0], 19),
    "decode": ([1, 1, 1, 0], [300, 1, 17, 0], 0),
    "chunk": ([120, 0], [400, 0], 8),
}


def plan_for(case: Case, max_kv_len: int = 8192) -> tuple[int, ...]:
    shape = case.shape
    sizes = (case.q.shape[0], len(case.rows), shape.num_q_heads, shape.num_kv_heads)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return plan_attention(*sizes, shape.head_dim, sms, max_kv_len).as_ints()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rows, kv_lens, num_pads", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("max_kv_len", [64, 8192])  # without and with splits
def test_real_plans_match_the_reference(
    shape: Shape, rows: list[int], kv_lens: list[int], num_pads: int, max_kv_len: int
) -> None:
    case = make_case(shape, rows, kv_lens, num_pads)
    want = reference(case)
    moved = case.to("cuda")
    out = moved.poisoned_out()
    paged_attention(*moved.operands(out), plan_for(case, max_kv_len))
    # bfloat16 weights and results carry 2**-9 of themselves. float32: sums in another order, and
    # the hardware's exp2 is good to 2 ulp; the largest difference seen on an H200 is 3.7e-6.
    tolerance = 1e-5 if shape.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().double(), want, atol=tolerance, rtol=0)
    assert not out[case.num_rows :].any()


@pytest.mark.parametrize("max_kv_len", [64, 8192])
def test_the_same_step_gives_the_same_bytes(max_kv_len: int) -> None:
    case = make_case(SHAPES["smollm2"], [40, 3], [400, 90], 5).to("cuda")
    outs = []
    for _ in range(5):
        out = case.poisoned_out()
        paged_attention(*case.operands(out), plan_for(case, max_kv_len))
        outs.append(out)
    assert all(same_bytes(out, outs[0]) for out in outs)


@pytest.mark.parametrize("max_kv_len", [64, 8192])
def test_one_recording_serves_every_position_byte_for_byte(max_kv_len: int) -> None:
    shape = SHAPES["smollm2"]
    first = make_case(shape, [32, 0], [32, 0], seed=1).to("cuda")
    later = make_case(shape, [20, 9], [500, 77], num_pads=3, seed=2).to("cuda")
    plan = plan_for(later, max_kv_len)
    # Static buffers as large as the larger case; block tables grow with it.
    static = make_case(shape, [20, 9], [500, 77], num_pads=3, seed=3).to("cuda")
    direct = {}
    for name, case in (("first", first), ("later", later)):
        out = case.poisoned_out()
        load(static, case)
        paged_attention(*static.operands(out), plan)
        direct[name] = out, static.k_cache.clone()
    out = static.poisoned_out()
    load(static, first)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        paged_attention(*static.operands(out), plan)
    assert same_bytes(out, static.poisoned_out()), "capture must not launch"
    for name, case in (("later", later), ("first", first), ("later", later)):
        load(static, case)
        out.view(torch.uint8).fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bytes(out, direct[name][0])
        assert same_bytes(static.k_cache, direct[name][1])


def load(static: Case, case: Case) -> None:
    """Copy a case into the buffers that a recording baked in."""
    for name in ("q", "k", "v", "kv_indices", "seq_starts", "kv_lens"):
        getattr(static, name).copy_(getattr(case, name))
    for name in ("k_cache", "v_cache"):
        getattr(static, name).fill_(float("nan"))[: getattr(case, name).shape[0]].copy_(
            getattr(case, name)
        )
    static.block_tables.zero_()[:, : case.block_tables.shape[1]].copy_(case.block_tables)
