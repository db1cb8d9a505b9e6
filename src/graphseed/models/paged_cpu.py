"""Paged attention on a CPU: gather each sequence's keys by its block table, then SDPA.

Owns the arithmetic of the operator for CPU tensors. Lengths are host memory here and may be read,
so ragged work is cut exactly. Same inputs give the same bytes. Does not know graphs or models;
shapes were checked by the operator, values (lengths against tables) are checked here.

T tokens in the step, S sequences, R rows of one part, K keys in view, Hq query heads, Hk key/value
heads, G = Hq / Hk, D head dim, B blocks, N block size, M blocks in a table row.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional

# Rows that share one SDPA call. Fewer see fewer masked keys, more share more work. SmolLM2-135M
# (9/3 heads of 64), 512 rows, float32, one thread, ms at 512 | 4,096 keys:
# 64 rows 5.3 | 71.3, 128 rows 5.7 | 67.9, 256 rows 6.3 | 64.0, 512 rows 8.3 | 66.4.
_ROWS: Final = 256


def paged_attention_cpu(
    q: torch.Tensor,  # [T, Hq, D]
    k: torch.Tensor,  # [T, Hk, D]
    v: torch.Tensor,  # [T, Hk, D]
    k_cache: torch.Tensor,  # [B, N, Hk, D]
    v_cache: torch.Tensor,  # [B, N, Hk, D]
    out: torch.Tensor,  # [T, Hq, D]
    kv_indices: torch.Tensor,  # [T]
    seq_starts: torch.Tensor,  # [S + 1]
    kv_lens: torch.Tensor,  # [S]
    block_tables: torch.Tensor,  # [S, M]
    sinks: torch.Tensor | None,  # [Hq]
    scale: float,
    soft_cap: float,
    window: int,
) -> None:
    """Write this step's K/V into the caches, then attend. Arguments as the operator's schema.

    Raises ValueError when starts decrease or a length does not fit its rows or block table,
    IndexError when a kv index or a block is outside the cache.
    """
    starts: list[int] = seq_starts.tolist()
    lens: list[int] = kv_lens.tolist()
    block_size = k_cache.shape[1]
    _check_lengths(starts, lens, q.shape[0], block_tables.shape[1] * block_size)
    num_rows = starts[-1]
    into = kv_indices[:num_rows].long()  # index_copy_ takes no int32
    k_cache.flatten(0, 1).index_copy_(0, into, k[:num_rows])
    v_cache.flatten(0, 1).index_copy_(0, into, v[:num_rows])
    for seq, kv_len in enumerate(lens):
        begin, end = starts[seq], starts[seq + 1]
        if begin == end:
            continue
        first_key = max(0, kv_len - (end - begin) - window + 1) if window else 0
        first_block = first_key // block_size
        table = block_tables[seq, first_block : -(-kv_len // block_size)]
        skipped = first_block * block_size
        keys = k_cache.index_select(0, table).flatten(0, 1)
        values = v_cache.index_select(0, table).flatten(0, 1)
        for row in range(begin, end, _ROWS):
            row_end = min(row + _ROWS, end)
            first_pos, end_pos = kv_len - end + row, kv_len - end + row_end
            lo = max(0, first_pos - window + 1) if window else 0
            seen = slice(lo - skipped, end_pos - skipped)  # memory outside may hold anything
            visible = _visible(first_pos, end_pos, lo, window)
            part = q[row:row_end], keys[seen], values[seen], visible, scale
            if soft_cap > 0 or sinks is not None:
                out[row:row_end] = _softmax_attention(*part, soft_cap, sinks)
            else:
                out[row:row_end] = _sdpa(*part)
    out[num_rows:].zero_()


def _check_lengths(
    starts: Sequence[int], lens: Sequence[int], num_tokens: int, max_kv_len: int
) -> None:
    if (
        starts[0] != 0
        or starts[-1] > num_tokens
        or any(a > b for a, b in zip(starts, starts[1:], strict=False))
    ):
        raise ValueError(
            f"seq_starts is {list(starts)}; it must begin at 0, never decrease, and end at or "
            f"below the step's {num_tokens} tokens"
        )
    for seq, kv_len in enumerate(lens):
        num_rows = starts[seq + 1] - starts[seq]
        if num_rows and not num_rows <= kv_len <= max_kv_len:
            raise ValueError(
                f"kv_lens[{seq}] is {kv_len}; with {num_rows} rows in this step and room for "
                f"{max_kv_len} keys in its block table it must lie between the two"
            )


def _visible(first_pos: int, end_pos: int, lo: int, window: int) -> torch.Tensor | None:
    """Which keys [lo, end_pos) rows [first_pos, end_pos) see, [R, K]; None when it is all.

    Boolean: building a float mask costs more (2.9 against 1.1 ms for 512 x 4,096) than SDPA
    gains by it (1 ms of 67).
    """
    if end_pos - first_pos == 1:
        return None
    position = torch.arange(first_pos, end_pos)[:, None]
    key = torch.arange(lo, end_pos)[None, :]
    visible = key <= position
    if window:
        visible &= position - key < window
    return visible


def _sdpa(
    q: torch.Tensor,  # [R, Hq, D]
    keys: torch.Tensor,  # [K, Hk, D]
    values: torch.Tensor,  # [K, Hk, D]
    visible: torch.Tensor | None,  # [R, K]
    scale: float,
) -> torch.Tensor:
    # enable_gqa against repeat_interleave at 512 rows of SmolLM2-135M, one thread, ms:
    # 31.5 | 33.5 at 2,048 keys, 66.8 | 68.0 at 4,096; and it copies nothing.
    result = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)  # [R, Hq, D]


def _softmax_attention(
    q: torch.Tensor,  # [R, Hq, D]
    keys: torch.Tensor,  # [K, Hk, D]
    values: torch.Tensor,  # [K, Hk, D]
    visible: torch.Tensor | None,  # [R, K]
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,  # [Hq]
) -> torch.Tensor:
    """Attention with its softmax written out in float32, for what SDPA cannot express."""
    num_rows, num_kv_heads = q.shape[0], keys.shape[1]
    by_group = q.float().reshape(num_rows, num_kv_heads, -1, q.shape[2])
    grouped = by_group.permute(1, 2, 0, 3)  # [Hk, G, R, D]
    logits = None if sinks is None else sinks.float().view(num_kv_heads, -1, 1, 1)
    results = []
    for head in range(num_kv_heads):  # one at a time: all scores at once could be gigabytes
        scores = grouped[head] @ keys[:, head].float().T * scale  # [G, R, K]
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        if logits is not None:
            scores = torch.cat([scores, logits[head].expand(-1, num_rows, 1)], -1)
        weights = scores.softmax(-1)[..., : keys.shape[0]]
        results.append(weights @ values[:, head].float())  # [G, R, D]
    return torch.cat(results).transpose(0, 1).to(q.dtype)  # [R, Hq, D]
