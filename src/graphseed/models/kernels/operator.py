# mypy: disallow-untyped-calls=False
"""The operator `graphseed::paged_attention`, registered for CPU, CUDA and Meta.

Owns its schema and the checks of shapes, layouts and types that all devices share. It has an out
form only, so a recorder sees one call that writes named buffers. Does not know models or steps.
Registered through `torch.library.Library`: the `custom_op` wrapper costs more than a small step's
attention. Triton is imported when the CUDA kernel first runs.

T tokens in the step, S sequences, Hq query heads, Hk key/value heads, D head dim, B blocks,
N block size, M blocks in a table row.

    q [T, Hq, D], k and v [T, Hk, D]: any strides, last dimension contiguous
    k_cache, v_cache [B, N, Hk, D], out [T, Hq, D]: contiguous, of the type of q
    kv_indices [T] int32: block * N + offset of each token's K/V, which is written first
    seq_starts [S + 1] int32: first row of each sequence, from 0 and never decreasing; rows from
        seq_starts[S] on are padding: neither written to the caches nor attended, and zero in out
    kv_lens [S] int32: keys of each sequence after this step; 0 for a place without rows
    block_tables [S, M] int32: blocks of each sequence in order
    sinks [Hq] or None: logit of one more softmax column, without a value
    scale > 0; soft_cap > 0: scores become soft_cap * tanh(score / soft_cap), 0.0: none
    window > 0: a key is seen iff it is fewer than `window` positions back, 0: none
    plan: AttentionPlan.as_ints(), which CPUs ignore

Causality is bottom-right: row i of n sits at position kv_len - n + i.
"""

from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import torch

from graphseed.models.paged_cpu import paged_attention_cpu

_SCHEMA: Final = (
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!) out, Tensor kv_indices, Tensor seq_starts, Tensor kv_lens, Tensor block_tables, "
    "Tensor? sinks, float scale, float soft_cap, int window, int[] plan) -> ()"
)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_PLAN_INTS: Final = 5
_BLOCK_SIZE_MIN: Final = 16


def _check(
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
    """Raise ValueError unless all arguments agree; a kernel would read or write out of bounds."""
    if q.dim() != 3 or k_cache.dim() != 4 or block_tables.dim() != 2:
        _refuse(
            "q, k_cache, block_tables",
            (q.dim(), k_cache.dim(), block_tables.dim()),
            "3, 4 and 2 dimensions",
        )
    num_tokens, num_q_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    num_seqs = block_tables.shape[0]
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        _refuse("q", f"{num_q_heads} heads", f"a multiple of the {num_kv_heads} K/V heads")
    if block_size < _BLOCK_SIZE_MIN or block_size & (block_size - 1):
        _refuse("k_cache", f"blocks of {block_size}", "a block size that is a power of two >= 16")
    kv, cache = (num_tokens, num_kv_heads, head_dim), (num_blocks, block_size, num_kv_heads)
    for name, tensor, shape in (
        ("k", k, kv),
        ("v", v, kv),
        ("k_cache", k_cache, (*cache, head_dim)),
        ("v_cache", v_cache, (*cache, head_dim)),
        ("out", out, q.shape),
        ("kv_indices", kv_indices, (num_tokens,)),
        ("seq_starts", seq_starts, (num_seqs + 1,)),
        ("kv_lens", kv_lens, (num_seqs,)),
    ):
        if tensor.shape != shape:
            _refuse(name, f"shape {list(tensor.shape)}", f"{list(shape)}")
    if sinks is not None and (sinks.shape != (num_q_heads,) or not sinks.is_contiguous()):
        _refuse("sinks", f"shape {list(sinks.shape)}", f"a contiguous [{num_q_heads}]")
    _check_types(q, (k, v, k_cache, v_cache, out), (kv_indices, seq_starts, kv_lens, block_tables))
    _check_layouts((q, k, v), (k_cache, v_cache, out))
    _check_numbers(scale, soft_cap, window, plan)


def _check_types(
    q: torch.Tensor, floats: Sequence[torch.Tensor], ints: Sequence[torch.Tensor]
) -> None:
    dtype = q.dtype
    if dtype not in _FLOATS:
        _refuse("q", dtype, "float32, bfloat16 or float16")
    for name, tensor in zip(("k", "v", "k_cache", "v_cache", "out"), floats, strict=True):
        if tensor.dtype is not dtype:
            _refuse(name, tensor.dtype, f"the type of q, {dtype}")
    names = ("kv_indices", "seq_starts", "kv_lens", "block_tables")
    for name, tensor in zip(names, ints, strict=True):
        if tensor.dtype is not torch.int32 or not tensor.is_contiguous():
            _refuse(name, f"{tensor.dtype}, strides {tensor.stride()}", "int32 and contiguous")


def _check_layouts(rows: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]) -> None:
    for name, tensor in zip(("q", "k", "v"), rows, strict=True):
        if tensor.stride(2) != 1:
            _refuse(name, f"strides {tensor.stride()}", "a contiguous last dimension")
    for name, tensor in zip(("k_cache", "v_cache", "out"), dense, strict=True):
        if not tensor.is_contiguous():
            _refuse(name, f"strides {tensor.stride()}", "a contiguous tensor")


def _check_numbers(scale: float, soft_cap: float, window: int, plan: Sequence[int]) -> None:
    if not scale > 0:
        _refuse("scale", scale, "a positive number")
    if not soft_cap >= 0:
        _refuse("soft_cap", soft_cap, "a positive number, or 0.0 for none")
    if window < 0:
        _refuse("window", window, "a positive number of keys, or 0 for none")
    if len(plan) != _PLAN_INTS:
        _refuse("plan", list(plan), "the five integers of AttentionPlan.as_ints()")


def _refuse(name: str, got: object, expected: str) -> NoReturn:
    raise ValueError(f"paged_attention: {name} is {got}; expected {expected}")


@torch.no_grad()
def _on_cpu(
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
    data = (q, k, v, k_cache, v_cache, out, kv_indices, seq_starts, kv_lens, block_tables, sinks)
    _check(*data, scale, soft_cap, window, plan)
    paged_attention_cpu(*data, scale, soft_cap, window)


@torch.no_grad()
def _on_cuda(
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
    from graphseed.models.kernels.launch import paged_attention_cuda

    data = (q, k, v, k_cache, v_cache, out, kv_indices, seq_starts, kv_lens, block_tables, sinks)
    _check(*data, scale, soft_cap, window, plan)
    paged_attention_cuda(*data, scale, soft_cap, window, plan)


def _define(library: torch.library.Library) -> Callable[..., None]:
    library.define(_SCHEMA)
    library.impl("paged_attention", _on_cpu, "CPU")
    library.impl("paged_attention", _on_cuda, "CUDA")
    library.impl("paged_attention", _check, "Meta")
    operator: Callable[..., None] = torch.ops.graphseed.paged_attention.default
    return operator


# A fragment: other rooms may define operators under the same name. Dropping the library would
# take the operator back, so it lives as long as the module.
_LIBRARY: Final = torch.library.Library("graphseed", "FRAGMENT")
paged_attention: Final = _define(_LIBRARY)
