"""How the paged attention kernels cut their work: tile sizes and KV splits, as plain integers.

Owns AttentionPlan and the rule that makes one. The rule sees capacities only, never a length, so
a plan is part of a graph's identity (I6) and one graph's direct run and replays cut alike (I9).
Does not know tensors or Triton.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

_ROWS_MIN: Final = 16  # the smallest tile edge that tensor cores take
_SPLITS_MAX: Final = 32  # the combining kernel holds all splits of a row in registers
_KV_BLOCKS_PER_SPLIT: Final = 2  # a shorter share costs more to combine than it saves
_WORKSPACE_BYTES: Final = 32 << 20  # stays in an H200's L2 (60 MB) between the two kernels
_PROGRAMS_PER_SM: Final = 2  # what registers and shared memory let an SM hold at once
_FP32_ROWS: Final = 32  # float32 runs on plain FMA units, where larger tiles spill registers
_FP32_KV: Final = 16
_FP32_WARPS: Final = 8


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Tile sizes of one attention launch. Raises ValueError for sizes no kernel takes."""

    block_rows: int  # (token, head of a group) rows of one program; a power of two >= 16
    block_kv: int  # keys a program visits at a time; a power of two >= 16
    num_splits: int  # programs that share one row block's keys
    num_warps: int
    num_stages: int  # depth of the software pipeline over keys

    def __post_init__(self) -> None:
        for name in ("block_rows", "block_kv"):
            value = getattr(self, name)
            if value < _ROWS_MIN or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two >= {_ROWS_MIN}")
        if not 1 <= self.num_splits <= 2 * _SPLITS_MAX:
            raise ValueError(f"num_splits is {self.num_splits}; expected 1 to {2 * _SPLITS_MAX}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps is {self.num_warps}; expected 1, 2, 4, 8 or 16")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages is {self.num_stages}; expected 1 to 8")

    def as_ints(self) -> tuple[int, int, int, int, int]:
        """The plan as the operator takes it, in the order of the fields."""
        return (
            self.block_rows,
            self.block_kv,
            self.num_splits,
            self.num_warps,
            self.num_stages,
        )

    def for_itemsize(self, itemsize: int, group: int) -> Self:
        """This plan, with tiles that fit an SM when elements are wider than two bytes."""
        if itemsize <= 2:
            return self
        rows = max(min(self.block_rows, _FP32_ROWS), next_power_of_2(group))
        kv = min(self.block_kv, _FP32_KV)
        return replace(self, block_rows=rows, block_kv=kv, num_warps=_FP32_WARPS, num_stages=1)


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is not less than a positive `value`."""
    return 1 << (value - 1).bit_length()


def plan_attention(
    num_tokens: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_sms: int,
    max_kv_len: int,
) -> AttentionPlan:
    """Choose tiles and splits for a step of these capacities.

    `num_tokens` and `num_seqs` are capacities of the step; no more tokens than sequences means
    decode. `num_sms` is the device's multiprocessors (1 on a CPU, which ignores the plan).
    `max_kv_len` is the most keys one row may look at: for a sliding window, at most
    window + num_tokens. Raises ValueError when a size is not positive or the heads do not divide.
    """
    _require_positive(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_sms=num_sms,
        max_kv_len=max_kv_len,
    )
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"{num_q_heads} query heads do not divide into {num_kv_heads} key/value heads"
        )
    group = num_q_heads // num_kv_heads
    is_decode = num_tokens <= num_seqs
    padded_dim = next_power_of_2(head_dim)
    rows_max, block_kv, num_stages = _tile_limits(padded_dim)
    rows_of_seq = group if is_decode else num_tokens * group
    block_rows = max(min(next_power_of_2(rows_of_seq), rows_max), _ROWS_MIN)
    block_rows = max(block_rows, next_power_of_2(group))  # a token's group stays in one program
    row_blocks = num_seqs if is_decode else -(-num_tokens // (block_rows // group))
    # Rounded down: one program too many for the SMs would cost a whole second wave.
    wanted = _PROGRAMS_PER_SM * num_sms // (row_blocks * num_kv_heads)
    by_keys = -(-max_kv_len // block_kv) // _KV_BLOCKS_PER_SPLIT
    by_memory = _WORKSPACE_BYTES // (num_tokens * num_q_heads * (head_dim + 1) * 4)
    return AttentionPlan(
        block_rows=block_rows,
        block_kv=block_kv,
        num_splits=max(1, min(wanted, by_keys, by_memory, _SPLITS_MAX)),
        num_warps=_num_warps(block_rows, padded_dim),
        num_stages=num_stages,
    )


def _tile_limits(padded_dim: int) -> tuple[int, int, int]:
    """Most rows, keys at a time and pipeline stages for one padded head size.

    The largest that compile for sm_90 in half precision without spilling a register (a soft cap
    at 256 spills 96 bytes, seldom used).
    """
    if padded_dim <= 64:
        return 128, 64, 3
    if padded_dim <= 128:
        return 128, 64, 2
    if padded_dim <= 256:
        return 64, 32, 2
    return 64, 16, 2


def _num_warps(block_rows: int, padded_dim: int) -> int:
    """Eight where four would have to keep more of a tile than registers hold."""
    return 8 if block_rows >= 128 or block_rows * padded_dim > 64 * 256 else 4


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; a plan needs sizes of at least 1")
