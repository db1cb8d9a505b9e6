"""The physical ceiling: what the device can do, and the least time a step can take on it.

Owns Ceiling (rates measured on this device) and StepCost (multiplications and bytes of a model's
step). The least time of a step is

    max(flops / matrix rate, bytes / copy bandwidth)

flops: 2 for each weight of a matrix and each token that passes it (of experts: those chosen; of the
output head: the rows whose logits are read; an embedding is looked up and costs none), and 4 for
each query head, element of the head, token and key that it sees.
bytes: every weight once in a step (of experts: the share that evenly routed tokens touch; of an
embedding: its rows), the K/V rows that are seen, once, and those that are written. Activations and
logits are not counted.

So a share of the ceiling above 100 % is possible: weights that stay in a cache are read faster than
a copy runs, and a large product is not the fastest of all. Does not know graphs or policies.
"""

# T tokens of the step, E experts, Hq and Hk heads, D head dim

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from graphseed.capture.driver import Driver
from graphseed.measure.bench.clock import laps_ms
from graphseed.measure.bench.grid import Piece
from graphseed.models.model import LayerShape, Model

# Large enough to fill the device, small enough to take a second in all.
_MATRIX_LEN: Final = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES: Final = {"cpu": 64 << 20, "cuda": 1 << 30}
_NUM_REPETITIONS: Final = {"cpu": 5, "cuda": 20}
_MEMORY_SHARE: Final = 4  # of the free memory, one part of so many may be taken
_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What this device does at best: medians of large products and copies."""

    tflops: Mapping[str, float]  # by dtype, e.g. "bfloat16"
    gbytes_per_second: float  # of a copy, read and written bytes together

    def floor_ms(self, dtype: str, flops: float, num_bytes: float) -> float:
        """The least milliseconds that work of these sizes can take."""
        return max(flops / (self.tflops[dtype] * 1e9), num_bytes / (self.gbytes_per_second * 1e6))


def measure_ceiling(driver: Driver, dtypes: Iterable[torch.dtype]) -> Ceiling:
    """Measure the matrix rate of each dtype and the copy bandwidth, on fresh random numbers.

    Call it before memory is taken: smaller sizes are used where little is free.
    """
    kind = torch.device(driver.device).type
    size = _COPY_BYTES[kind]
    while 2 * size > driver.free_bytes() // _MEMORY_SHARE and size > 1 << 20:
        size //= 2
    source = torch.randint(256, (size,), dtype=torch.uint8, device=driver.device)
    target = torch.empty_like(source)
    copy_ms = _median_ms(driver, partial(target.copy_, source), _NUM_REPETITIONS[kind])
    del source, target
    return Ceiling(
        {_name(dtype): _tflops(driver, dtype, kind) for dtype in dict.fromkeys(dtypes)},
        gbytes_per_second=2 * size / copy_ms / 1e6,
    )


def _tflops(driver: Driver, dtype: torch.dtype, kind: str) -> float:
    length = _MATRIX_LEN[kind]
    while 3 * length**2 * dtype.itemsize > driver.free_bytes() // _MEMORY_SHARE and length > 256:
        length //= 2
    a, b = (torch.randn(length, length, device=driver.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    ms = _median_ms(driver, partial(torch.mm, a, b, out=out), _NUM_REPETITIONS[kind])
    return 2 * length**3 / ms / 1e9


def _median_ms(driver: Driver, work: Any, num_repetitions: int) -> float:
    laps_ms(driver, work, work)  # libraries, clocks, pages that were never touched
    # In one go, so that the host's submission hides behind the work before.
    return statistics.median(laps_ms(driver, *[work] * num_repetitions))


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step of one model multiplies and moves at least."""

    matrix_weights: int  # elements of the matrices that every token passes
    other_bytes: int  # of those and of all that is neither expert, embedding nor head
    head_weights: int  # elements of the output head
    head_bytes: int
    row_bytes: int  # of one embedding
    expert_weights: int  # elements of all experts
    expert_bytes: int
    num_experts: int  # of a layer; 0: none
    num_chosen: int  # experts that a token passes in a layer
    layers: Sequence[LayerShape]
    itemsize: int  # bytes of one element of K/V

    @classmethod
    def of(cls, model: Model) -> "StepCost":
        """Sort a model's weights by how a step uses them."""
        module, config = model.module, model.module.config.get_text_config()
        num_experts = next((n for n in (getattr(config, c, None) for c in _COUNTS) if n), 0)
        embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings()
        # transformers names routed experts so, one by one or stacked; shared ones are dense.
        named = [(name.split("."), weight) for name, weight in module.named_parameters()]
        apart = {id(embedding), id(head.weight)}
        experts = [w for names, w in named if num_experts and "experts" in names]
        others = [
            w for names, w in named
            if id(w) not in apart and not (num_experts and "experts" in names)
        ]  # fmt: skip
        return cls(
            matrix_weights=sum(w.numel() for w in others if w.dim() >= 2),
            other_bytes=sum(w.nbytes for w in others),
            head_weights=head.weight.numel(),
            head_bytes=head.weight.nbytes,
            row_bytes=embedding.shape[1] * embedding.itemsize,
            expert_weights=sum(w.numel() for w in experts),
            expert_bytes=sum(w.nbytes for w in experts),
            num_experts=num_experts,
            num_chosen=config.num_experts_per_tok if num_experts else 0,
            layers=model.layers,
            itemsize=model.dtype.itemsize,
        )

    def of_step(self, pieces: Sequence[Piece]) -> tuple[float, float]:
        """Multiplications and additions, and bytes, of one step."""
        num_tokens = sum(piece.num_tokens for piece in pieces)
        flops = 2.0 * (self.matrix_weights * num_tokens + self.head_weights * len(pieces))
        moved = float(self.other_bytes + self.head_bytes + self.row_bytes * num_tokens)
        if self.num_experts:
            chosen = self.num_chosen / self.num_experts
            flops += 2.0 * self.expert_weights * chosen * num_tokens
            moved += self.expert_bytes * (1 - (1 - chosen) ** num_tokens)
        for layer in self.layers:
            row = 2 * layer.num_kv_heads * layer.head_dim * self.itemsize  # K and V of a token
            for piece in pieces:
                keys = num_visible_keys(piece, layer.window)
                flops += 4.0 * layer.num_q_heads * layer.head_dim * keys
                moved += row * (_num_keys_read(piece, layer.window) + piece.num_tokens)
        return flops, moved

    def floor_ms(self, ceiling: Ceiling, dtype: str, steps: Iterable[Sequence[Piece]]) -> float:
        """The least milliseconds of several steps, one after another."""
        return sum(ceiling.floor_ms(dtype, *self.of_step(step)) for step in steps)


def num_visible_keys(piece: Piece, window: int) -> int:
    """Keys that the tokens of a causal piece see, summed over its tokens."""
    start, length = piece.start, piece.num_tokens
    growing = length if not window else max(0, min(length, window - start))
    return growing * start + growing * (growing + 1) // 2 + (length - growing) * window


def _num_keys_read(piece: Piece, window: int) -> int:
    """Different keys that some token of a piece sees, its own among them."""
    kv_len = piece.start + piece.num_tokens
    return min(kv_len, window + piece.num_tokens - 1) if window else kv_len


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
