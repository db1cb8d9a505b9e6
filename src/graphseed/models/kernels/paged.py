# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-untyped-calls=False, disallow-incomplete-defs=False
"""Triton kernels of paged attention: write K/V, attend, combine the splits.

Owns the arithmetic on the device. Every length, start and block table is read from memory on the
device, so one launch configuration serves every position (I6). Does not know how tiles are chosen
(`plan`), nor how tensors are checked and launched (`launch`). Importing it imports Triton.

T tokens in the step, S sequences, Hq query heads, Hk key/value heads, G = Hq / Hk heads of one
group, D head dim, N block size, M blocks in a table row.
A *row* is one (token, head of the group); a *row block* is BLOCK_ROWS // G tokens of one sequence
for one key/value head, so a key is loaded once for its whole group. Rows past the last sequence
are padding: they form a virtual sequence S that sees no key and whose output is zero.
Scores live in the exp2 domain: they carry a factor log2(e).
"""

import triton
import triton.language as tl

# What differs between steps, models or addresses and must not cause another compilation.
_UNSPECIALIZED = [
    *("num_tokens", "num_seqs", "table_len", "num_splits", "window"),
    *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"),
    *("kv_indices", "seq_starts", "kv_lens", "block_tables", "sinks"),
]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    kv_indices,
    seq_starts,
    num_seqs,
    k_token,
    k_head,
    v_token,
    v_head,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    UNIT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Copy each real token's keys and values to its kv index. Grid [T, ROW / LANES].

    ROW = Hk * D elements; strides count UNIT elements, so that wide loads stay provable.
    """
    token = tl.program_id(0)
    if token >= tl.load(seq_starts + num_seqs):
        return  # padding
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    ok = lane < ROW
    head = lane // HEAD_DIM
    dim = lane % HEAD_DIM
    into = tl.load(kv_indices + token).to(tl.int64) * ROW + lane
    token = token.to(tl.int64)
    key = tl.load(k + token * (k_token * UNIT) + head * (k_head * UNIT) + dim, mask=ok)
    tl.store(k_cache + into, key, mask=ok)
    value = tl.load(v + token * (v_token * UNIT) + head * (v_head * UNIT) + dim, mask=ok)
    tl.store(v_cache + into, value, mask=ok)


@triton.jit
def _locate(
    seq_starts,
    kv_lens,
    num_tokens,
    num_seqs,
    row_block,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Find a row block's sequence (S for the padding), first token, end token and kv_len.

    Sequence s owns the row blocks from start(s) // TOKENS + s on: enough for every sequence
    whatever the lengths are, and known from its start alone. Counting the sequences that begin
    at or before the row block takes one round trip to memory where a bisection takes log2(S).
    """
    count = 0
    for base in range(0, num_seqs + 1, LANES):
        lane = base + tl.arange(0, LANES)
        start = tl.load(seq_starts + lane, mask=lane <= num_seqs, other=0)
        begins = (lane <= num_seqs) & (start // TOKENS + lane <= row_block)
        count += tl.sum(begins.to(tl.int32), axis=0)
    seq = count - 1
    start = tl.load(seq_starts + seq)
    is_real = seq < num_seqs
    end = tl.load(seq_starts + seq + 1, mask=is_real, other=num_tokens)
    kv_len = tl.load(kv_lens + seq, mask=is_real, other=0)
    first_token = start + (row_block - (start // TOKENS + seq)) * TOKENS
    return seq, first_token, end, kv_len


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)


@triton.jit
def _visit(
    acc,  # [BLOCK_ROWS, D_PAD] float32
    row_max,  # [BLOCK_ROWS]
    row_sum,  # [BLOCK_ROWS]
    q,  # [BLOCK_ROWS, D_PAD]
    keys,
    values,
    table,
    begin,
    end,
    first_key,
    end_key,
    position,  # [BLOCK_ROWS]
    window,
    inner,
    outer,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    D_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the keys [begin, end) into a running softmax.

    Without MASKED every key must be visible to every row. With it, keys outside
    [first_key, end_key) are never loaded: their memory may hold anything, NaN included.
    """
    dim = tl.arange(0, D_PAD)
    for base in range(begin, end, BLOCK_KV):
        key_pos = base + tl.arange(0, BLOCK_KV)
        in_range = (key_pos >= first_key) & (key_pos < end_key)
        if MASKED:
            block = tl.load(table + key_pos // BLOCK_SIZE, mask=in_range, other=0)
        else:
            block = tl.load(table + key_pos // BLOCK_SIZE)
        row = (block.to(tl.int64) * BLOCK_SIZE + key_pos % BLOCK_SIZE) * ROW
        offset = row[:, None] + dim[None, :]
        if MASKED or D_PAD > HEAD_DIM:
            ok = (dim < HEAD_DIM)[None, :]
            if MASKED:
                ok = ok & in_range[:, None]
            k = tl.load(keys + offset, mask=ok, other=0.0)
            v = tl.load(values + offset, mask=ok, other=0.0)
        else:
            k = tl.load(keys + offset)
            v = tl.load(values + offset)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_CAP:
            scores = _tanh(scores * inner)
        if MASKED:
            visible = in_range[None, :] & (key_pos[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (position[:, None] - key_pos[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * outer)
        shift = new_max
        if MASKED:  # a row that has seen no key yet must not compute inf - inf
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * outer - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _share_of_keys(
    first_pos,
    kv_len,
    window,
    split,
    num_splits,
    TOKENS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Cut what a row block may see into tiles, and give split `split` its contiguous share.

    Returns (begin, full_begin, full_end, end, first_key, end_key): the share is [begin, end), of
    which [full_begin, full_end) is visible to every row; [first_key, end_key) holds every key
    that any row sees. The share is empty when the splits outnumber the tiles, and for padding.
    """
    end_key = tl.minimum(first_pos + TOKENS, kv_len)
    first_key = 0
    front = 0  # keys before it are out of the last row's window
    if HAS_WINDOW:
        first_key = tl.maximum(first_pos - window + 1, 0)
        front = tl.cdiv(tl.maximum(end_key - window, 0), BLOCK_KV) * BLOCK_KV
    first_tile = first_key // BLOCK_KV
    num_tiles = tl.maximum(tl.cdiv(end_key, BLOCK_KV) - first_tile, 0)
    tiles = tl.cdiv(num_tiles, num_splits)
    begin = (first_tile + tl.minimum(split * tiles, num_tiles)) * BLOCK_KV
    end = (first_tile + tl.minimum((split + 1) * tiles, num_tiles)) * BLOCK_KV
    full_begin = tl.minimum(tl.maximum(front, begin), end)
    full_end = (tl.maximum(first_pos + 1, 0) // BLOCK_KV) * BLOCK_KV
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end, first_key, end_key


@triton.jit
def _with_sink(acc, row_max, row_sum, sink, HAS_SINKS: tl.constexpr):
    """Give the softmax one more column that has a logit and no value."""
    if HAS_SINKS:
        logit = sink * 1.4426950408889634  # log2(e)
        peak = tl.maximum(row_max, logit)
        rescale = tl.exp2(row_max - peak)
        row_sum = row_sum * rescale + tl.exp2(logit - peak)
        acc = acc * rescale[:, None]
    return acc, row_sum


@triton.jit
def _store_share(
    partial, partial_lse, into, acc, row_max, row_sum, row_ok, dim, HEAD_DIM: tl.constexpr
):
    """Write one split's normalised result and its log-sum-exp; rows that saw no key get -inf."""
    has_keys = row_sum > 0
    total = tl.where(has_keys, row_sum, 1.0)
    lse = tl.where(has_keys, row_max + tl.log2(total), float("-inf"))
    tl.store(partial_lse + into, lse, mask=row_ok)
    ok = (row_ok & has_keys)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(partial + into[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], mask=ok)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def attend_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial,
    partial_lse,
    seq_starts,
    kv_lens,
    block_tables,
    sinks,
    num_tokens,
    num_seqs,
    table_len,
    num_splits,
    q_token,
    q_head,
    window,
    inner,
    outer,
    GROUP: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one row block to its share of the keys. Grid [T // TOKENS + S + 1, Hk, splits].

    Scores are `outer * score` or, with HAS_CAP, `outer * tanh(inner * score)`.
    With SPLIT, writes partial [T, Hq, splits, D] and partial_lse [T, Hq, splits] (-inf for an
    empty share, whose partial stays unwritten); else writes out [T, Hq, D] itself.
    """
    TOKENS: tl.constexpr = BLOCK_ROWS // GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq, first_token, end_token, kv_len = _locate(
        seq_starts, kv_lens, num_tokens, num_seqs, tl.program_id(0), TOKENS, 128
    )
    if first_token >= end_token:
        return

    # Rows are token-major, so that a row block sees a tight range of keys.
    row = tl.arange(0, BLOCK_ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_ok = (token < end_token) & (row < TOKENS * GROUP)
    dim = tl.arange(0, D_PAD)
    ok = row_ok[:, None] & (dim < HEAD_DIM)[None, :]
    q_row = token.to(tl.int64) * (q_token * UNIT) + head * (q_head * UNIT)
    query = tl.load(q + q_row[:, None] + dim[None, :], mask=ok, other=0.0)

    # Causality is bottom-right: a sequence's last row sits at the last of its kv_len keys.
    shift = kv_len - end_token
    position = token + shift
    begin, full_begin, full_end, end, first_key, end_key = _share_of_keys(
        first_token + shift, kv_len, window, split, num_splits, TOKENS, BLOCK_KV, HAS_WINDOW
    )
    keys = k_cache + kv_head * HEAD_DIM
    values = v_cache + kv_head * HEAD_DIM
    table = block_tables + seq.to(tl.int64) * table_len
    acc = tl.zeros([BLOCK_ROWS, D_PAD], tl.float32)
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    # Three ranges: the window's ragged front, the keys that every row sees, the causal edge.
    for phase in tl.static_range(0 if HAS_WINDOW else 1, 3):
        lo = begin if phase == 0 else (full_begin if phase == 1 else full_end)
        hi = full_begin if phase == 0 else (full_end if phase == 1 else end)
        acc, row_max, row_sum = _visit(
            acc, row_max, row_sum, query, keys, values, table, lo, hi, first_key, end_key,
            position, window, inner, outer, phase != 1, HAS_WINDOW, HAS_CAP, HEAD_DIM, ROW,
            BLOCK_SIZE, BLOCK_KV, D_PAD, PRECISION,
        )  # fmt: skip

    out_row = token.to(tl.int64) * NUM_Q_HEADS + head
    if SPLIT:
        into = out_row * num_splits + split
        _store_share(partial, partial_lse, into, acc, row_max, row_sum, row_ok, dim, HEAD_DIM)
    else:
        sink = 0.0
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=row_ok, other=0.0).to(tl.float32)
        acc, row_sum = _with_sink(acc, row_max, row_sum, sink, HAS_SINKS)
        total = tl.where(row_sum > 0, row_sum, 1.0)
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], result, mask=ok)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def combine_kernel(
    partial,
    partial_lse,
    out,
    sinks,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the splits of one (token, head), add its sink, write out. Grid [T, Hq].

    A padded row has no share with a key, so it comes out as zero.
    """
    head = tl.program_id(1)
    out_row = tl.program_id(0).to(tl.int64) * NUM_Q_HEADS + head
    split = tl.arange(0, SPLITS_PAD)
    into = out_row * NUM_SPLITS + split
    lse = tl.load(partial_lse + into, mask=split < NUM_SPLITS, other=float("-inf"))
    peak = tl.max(lse, 0)
    if HAS_SINKS:
        logit = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634  # log2(e)
        peak = tl.maximum(peak, logit)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(lse - peak)  # [SPLITS_PAD]
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(logit - peak)
    dim = tl.arange(0, D_PAD)
    ok = (lse > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]  # the rest was never written
    values = tl.load(partial + into[:, None] * HEAD_DIM + dim[None, :], mask=ok, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + out_row * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
