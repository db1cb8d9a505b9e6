"""The CUDA side of the paged attention operator: which kernels run, on which grid.

Owns the workspace of the split kernels (ordinary allocations, so a capture keeps them in its own
pool). Does not check its arguments: the operator did. Launches on the current device and stream,
reads nothing back, and compiles nothing once a shape of model has been seen.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton

from graphseed.models.kernels.paged import attend_kernel, combine_kernel, write_kv_kernel
from graphseed.models.kernels.plan import AttentionPlan, next_power_of_2

_LOG2_E: Final = 1.4426950408889634
_LANES_MAX: Final = 1024  # elements that one program of the K/V write copies
_WIDE: Final = 8  # elements of 16 bytes in half precision: the widest load there is


def paged_attention_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    kv_indices: torch.Tensor,
    seq_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
    window: int,
    plan: Sequence[int],
) -> None:
    """Write this step's K/V into the caches, then attend. Arguments as the operator's schema."""
    if q.shape[0] == 0:
        return
    group = q.shape[1] // k.shape[1]
    tiles = AttentionPlan(*plan).for_itemsize(q.element_size(), group)
    _write_kv(k, v, k_cache, v_cache, kv_indices, seq_starts)
    _attend(
        q,
        k_cache,
        v_cache,
        out,
        seq_starts,
        kv_lens,
        block_tables,
        sinks,
        scale,
        soft_cap,
        window,
        tiles,
    )


def _write_kv(
    k: torch.Tensor,  # [T, Hk, D]
    v: torch.Tensor,  # [T, Hk, D]
    k_cache: torch.Tensor,  # [B, N, Hk, D]
    v_cache: torch.Tensor,  # [B, N, Hk, D]
    kv_indices: torch.Tensor,  # [T]
    seq_starts: torch.Tensor,  # [S + 1]
) -> None:
    num_tokens, num_kv_heads, head_dim = k.shape
    row = num_kv_heads * head_dim
    lanes = min(next_power_of_2(row), _LANES_MAX)
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    unit = _stride_unit(*strides)
    write_kv_kernel[(num_tokens, triton.cdiv(row, lanes))](
        k,
        v,
        k_cache,
        v_cache,
        kv_indices,
        seq_starts,
        seq_starts.shape[0] - 1,
        *(stride // unit for stride in strides),
        HEAD_DIM=head_dim,
        ROW=row,
        UNIT=unit,
        LANES=lanes,
        num_warps=1 if lanes <= 256 else 4,
    )


def _attend(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [B, N, Hk, D]
    v_cache: torch.Tensor,  # [B, N, Hk, D]
    out: torch.Tensor,  # [T, Hq, D]
    seq_starts: torch.Tensor,  # [S + 1]
    kv_lens: torch.Tensor,  # [S]
    block_tables: torch.Tensor,  # [S, M]
    sinks: torch.Tensor | None,  # [Hq]
    scale: float,
    soft_cap: float,
    window: int,
    plan: AttentionPlan,
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_seqs, table_len = block_tables.shape
    group = num_q_heads // num_kv_heads
    d_pad = max(next_power_of_2(head_dim), 16)  # the shortest edge that tensor cores take
    is_split = plan.num_splits > 1
    partial, partial_lse = out, out  # not touched without splits
    if is_split:
        shape = (num_tokens, num_q_heads, plan.num_splits)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    unit = _stride_unit(q.stride(0), q.stride(1))
    row_blocks = num_tokens // (plan.block_rows // group) + num_seqs + 1
    attend_kernel[(row_blocks, num_kv_heads, plan.num_splits)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        partial_lse,
        seq_starts,
        kv_lens,
        block_tables,
        out if sinks is None else sinks,
        num_tokens,
        num_seqs,
        table_len,
        plan.num_splits,
        q.stride(0) // unit,
        q.stride(1) // unit,
        window,
        scale / soft_cap if soft_cap > 0 else 1.0,
        (soft_cap if soft_cap > 0 else scale) * _LOG2_E,
        GROUP=group,
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        D_PAD=d_pad,
        ROW=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_KV=plan.block_kv,
        UNIT=unit,
        SPLIT=is_split,
        HAS_WINDOW=window > 0,
        HAS_CAP=soft_cap > 0,
        HAS_SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if is_split:
        splits_pad = next_power_of_2(plan.num_splits)
        combine_kernel[(num_tokens, num_q_heads)](
            partial,
            partial_lse,
            out,
            out if sinks is None else sinks,
            NUM_Q_HEADS=num_q_heads,
            HEAD_DIM=head_dim,
            D_PAD=d_pad,
            NUM_SPLITS=plan.num_splits,
            SPLITS_PAD=splits_pad,
            HAS_SINKS=sinks is not None,
            num_warps=1 if splits_pad * d_pad <= 1024 else 4,
        )


def _stride_unit(*strides: int) -> int:
    """Elements that strides are counted in: _WIDE when all allow it, so wide loads are provable.

    The strides themselves stay unspecialized, as a step of one token may have any.
    """
    return 1 if any(stride % _WIDE for stride in strides) else _WIDE
