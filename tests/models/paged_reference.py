"""A ragged batch over paged K/V, and what attention over it must be, written naively in float64.

Owns the cases that the CPU operator, the Triton kernels and the GPU are all compared on. Knows
nothing of the code under test: sequences are made whole first, then cut into blocks.
"""

from dataclasses import dataclass
from typing import Self

import torch

POISON = 0xA5


@dataclass(frozen=True)
class Shape:
    """What does not depend on the lengths."""

    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    scale: float = 0.125


@dataclass
class Case:
    """Operands of one step. Memory that nobody may read holds NaN."""

    shape: Shape
    rows: list[int]  # of each sequence in this step
    kv_lens_list: list[int]
    whole_k: list[torch.Tensor]  # a sequence: [kv_len, Hk, D], in the case's dtype
    whole_v: list[torch.Tensor]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_indices: torch.Tensor
    seq_starts: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: torch.Tensor
    sinks: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    def poisoned_out(self) -> torch.Tensor:
        out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        out.view(torch.uint8).fill_(POISON)
        return out

    def operands(self, out: torch.Tensor) -> tuple[object, ...]:
        """Everything the operator takes before its plan."""
        shape = self.shape
        return (
            *(self.q, self.k, self.v, self.k_cache, self.v_cache, out),
            *(self.kv_indices, self.seq_starts, self.kv_lens, self.block_tables),
            *(self.sinks, shape.scale, shape.soft_cap, shape.window),
        )

    def to(self, device: str) -> Self:
        """The same case on another device."""
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
        return type(self)(**moved)


def make_case(
    shape: Shape, rows: list[int], kv_lens: list[int], num_pads: int = 0, seed: int = 0
) -> Case:
    """Cut random sequences into shuffled blocks; the last `rows[s]` tokens of each are the step."""
    gen = torch.Generator().manual_seed(seed)
    size, kv_shape = shape.block_size, (shape.num_kv_heads, shape.head_dim)
    needed = [-(-kv_len // size) for kv_len in kv_lens]
    num_blocks = 1 + sum(needed) + 2
    free = (torch.randperm(num_blocks - 1, generator=gen) + 1).tolist()  # block 0 is nobody's
    k_cache = torch.full((num_blocks, size, *kv_shape), float("nan"), dtype=shape.dtype)
    v_cache = k_cache.clone()
    tables = torch.zeros(len(rows), max(*needed, 1) + 1, dtype=torch.int32)
    whole_k, whole_v, indices = [], [], []
    for seq, (num_rows, kv_len) in enumerate(zip(rows, kv_lens, strict=True)):
        k = torch.randn(kv_len, *kv_shape, generator=gen).to(shape.dtype)
        v = torch.randn(kv_len, *kv_shape, generator=gen).to(shape.dtype)
        mine = [free.pop() for _ in range(needed[seq])]
        tables[seq, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        places = [mine[p // size] * size + p % size for p in range(kv_len)]
        for pos in range(kv_len - num_rows):  # what earlier steps wrote
            k_cache.view(-1, *kv_shape)[places[pos]] = k[pos]
            v_cache.view(-1, *kv_shape)[places[pos]] = v[pos]
        indices += places[kv_len - num_rows :]
        whole_k.append(k)
        whole_v.append(v)
    num_real, num_tokens = sum(rows), sum(rows) + num_pads
    # As a model makes them: q is a transposed view, k and v are slices of one wider row.
    q = torch.randn(shape.num_q_heads, num_tokens, shape.head_dim, generator=gen)
    fused = torch.full((num_tokens, 2, *kv_shape), 7.0, dtype=shape.dtype)  # padding would show
    for seq, num_rows in enumerate(rows):
        start = sum(rows[:seq])
        fused[start : start + num_rows, 0] = whole_k[seq][len(whole_k[seq]) - num_rows :]
        fused[start : start + num_rows, 1] = whole_v[seq][len(whole_v[seq]) - num_rows :]
    q = q.to(shape.dtype).transpose(0, 1)
    q[num_real:] = float("nan")
    return Case(
        shape=shape,
        rows=rows,
        kv_lens_list=kv_lens,
        whole_k=whole_k,
        whole_v=whole_v,
        q=q,
        k=fused[:, 0],
        v=fused[:, 1],
        k_cache=k_cache,
        v_cache=v_cache,
        kv_indices=torch.tensor(indices + [i % size for i in range(num_pads)], dtype=torch.int32),
        seq_starts=torch.tensor(
            [sum(rows[:seq]) for seq in range(len(rows) + 1)], dtype=torch.int32
        ),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        block_tables=tables,
        sinks=torch.randn(shape.num_q_heads, generator=gen) if shape.has_sinks else None,
    )


def reference(case: Case) -> torch.Tensor:
    """[T, Hq, D] float64: one row, one head, one softmax at a time."""
    shape = case.shape
    group = shape.num_q_heads // shape.num_kv_heads
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    row = 0
    for seq, num_rows in enumerate(case.rows):
        keys, values = case.whole_k[seq].double().cpu(), case.whole_v[seq].double().cpu()
        for i in range(num_rows):
            pos = case.kv_lens_list[seq] - num_rows + i
            first = max(0, pos - shape.window + 1) if shape.window else 0
            for head in range(shape.num_q_heads):
                k = keys[first : pos + 1, head // group]
                v = values[first : pos + 1, head // group]
                scores = k @ case.q[row, head].double().cpu() * shape.scale
                if shape.soft_cap:
                    scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
                weights = scores.exp()
                total = weights.sum()
                if case.sinks is not None:
                    total = total + case.sinks[head].double().cpu().exp()
                out[row, head] = weights @ v / total
            row += 1
    return out


def expected_caches(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What the caches must hold after the step: only the real rows' places have changed."""
    caches = []
    for cache, new in ((case.k_cache, case.k), (case.v_cache, case.v)):
        after = cache.clone()
        flat = after.view(-1, *after.shape[2:])
        for row in range(case.num_rows):
            flat[int(case.kv_indices[row])] = new[row]
        caches.append(after)
    return caches[0], caches[1]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
