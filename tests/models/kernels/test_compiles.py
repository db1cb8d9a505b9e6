"""The kernels compile for a Hopper GPU, checked where there is none: Triton brings ptxas along.

The interpreter runs the kernels as Python and so accepts what the compiler refuses. Compiling needs
a process of its own, because Triton chooses between the two when a kernel is decorated.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SM_90_SHARED_BYTES = 227 << 10
SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from graphseed.models.kernels import paged
from graphseed.models.kernels.plan import next_power_of_2, plan_attention

def build(kernel, types, constants, aligned, warps, stages):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    values = {(names.index(n),): v for n, v in constants.items()}
    options = dict(num_warps=warps, num_stages=stages)
    source = ASTSource(kernel, signature, values, attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "shared_bytes": built.metadata.shared,
        "has_wgmma": "wgmma.mma_async" in ptx,
        "has_wide_copy": ", 0x10;" in ptx or "v4.b32" in ptx,
        "cubin_bytes": len(built.asm["cubin"]),
    }

def attend(num_tokens, q_heads, kv_heads, dim, dtype, extras):
    group, itemsize = q_heads // kv_heads, 4 if dtype == "fp32" else 2
    plan = plan_attention(num_tokens, 1, q_heads, kv_heads, dim, 132, 8192)
    plan = plan.for_itemsize(itemsize, group)
    wide = ["q", "k_cache", "v_cache", "out"]
    types = {n: "*" + dtype for n in [*wide, "sinks"]}
    types |= {n: "*i32" for n in ("seq_starts", "kv_lens", "block_tables")}
    types |= {"partial": "*fp32", "partial_lse": "*fp32", "inner": "fp32", "outer": "fp32"}
    constants = dict(
        GROUP=group, NUM_Q_HEADS=q_heads, HEAD_DIM=dim, D_PAD=next_power_of_2(dim),
        ROW=kv_heads * dim, BLOCK_SIZE=16, BLOCK_ROWS=plan.block_rows, BLOCK_KV=plan.block_kv,
        UNIT=8, SPLIT=plan.num_splits > 1, HAS_WINDOW=extras, HAS_CAP=extras, HAS_SINKS=extras,
        PRECISION="ieee" if itemsize == 4 else "tf32",
    )
    return build(paged.attend_kernel, types, constants, wide, plan.num_warps, plan.num_stages)

def write_kv():
    types = {n: "*bf16" for n in ("k", "v", "k_cache", "v_cache")}
    types |= {"kv_indices": "*i32", "seq_starts": "*i32"}
    constants = dict(HEAD_DIM=64, ROW=192, UNIT=8, LANES=256)
    return build(paged.write_kv_kernel, types, constants, ["k", "v", "k_cache", "v_cache"], 1, 3)

def combine():
    types = {"partial": "*fp32", "partial_lse": "*fp32", "out": "*bf16", "sinks": "*bf16"}
    constants = dict(NUM_Q_HEADS=9, HEAD_DIM=64, D_PAD=64, NUM_SPLITS=6, SPLITS_PAD=8,
                     HAS_SINKS=True)
    return build(paged.combine_kernel, types, constants, ["partial", "out"], 1, 3)

print(json.dumps(eval(sys.argv[1])))
"""


def compile_kernel(call: str, cache: Path) -> dict[str, int]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, call], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_prompt_chunk_compiles_to_tensor_core_and_wide_copy_instructions(tmp_path: Path) -> None:
    built = compile_kernel("attend(512, 9, 3, 64, 'bf16', False)", tmp_path)
    assert built["has_wgmma"]
    assert built["has_wide_copy"]
    assert built["shared_bytes"] <= SM_90_SHARED_BYTES // 2, "two programs must fit an SM"


@pytest.mark.parametrize("call", ["write_kv()", "combine()"])
def test_the_small_kernels_compile_with_wide_copies(call: str, tmp_path: Path) -> None:
    assert compile_kernel(call, tmp_path)["has_wide_copy"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "heads", [(9, 3, 64), (32, 8, 128), (4, 1, 256), (8, 1, 512), (32, 32, 96), (71, 1, 64)]
)
@pytest.mark.parametrize("num_tokens", [1, 512])
def test_every_family_of_tiles_fits_an_sm(
    heads: tuple[int, int, int], dtype: str, num_tokens: int, tmp_path: Path
) -> None:
    q_heads, kv_heads, dim = heads
    call = f"attend({num_tokens}, {q_heads}, {kv_heads}, {dim}, {dtype!r}, True)"
    assert compile_kernel(call, tmp_path)["shared_bytes"] <= SM_90_SHARED_BYTES
