"""How a model attends over paged K/V: the step, the context that carries it, and transformers.

Owns the step that layers attend with and the attention function of Hugging Face models. Does not
know the arithmetic (`kernels.operator`), how blocks are handed out, or how steps are planned; does
not import transformers until `register` is called.

T tokens in the step, S sequences, Hq query heads, Hk key/value heads, D head dim, B blocks,
N block size, M blocks in a table row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

import torch

from graphseed.models.errors import ModelUnsupported
from graphseed.models.kernels.operator import paged_attention
from graphseed.models.kernels.plan import AttentionPlan

ATTENTION_NAME: Final = "graphseed_paged"  # what attn_implementation is set to

# Arguments of other attention functions that change the result: sparse choices and biases.
_MEANINGFUL: Final = ("position_bias", "indices", "block_indices", "sinks")


class AttentionContext(Protocol):
    """What a model's attention layers call for one step. Used by the engine's thread."""

    def attend(
        self,
        layer_idx: int,
        q: torch.Tensor,  # [T, Hq, D]
        k: torch.Tensor,  # [T, Hk, D]
        v: torch.Tensor,  # [T, Hk, D]
        *,
        scale: float,
        window: int,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write K/V of this layer, attend, and return [T, Hq, D]."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """One step over paged K/V. Borrows every tensor; `kernels.operator` says what each means."""

    kv_indices: torch.Tensor  # [T] int32
    seq_starts: torch.Tensor  # [S + 1] int32
    kv_lens: torch.Tensor  # [S] int32
    block_tables: torch.Tensor  # [S, M] int32
    k_caches: tuple[torch.Tensor, ...]  # a layer: [B, N, Hk, D]
    v_caches: tuple[torch.Tensor, ...]  # a layer: [B, N, Hk, D]
    plans: AttentionPlan | tuple[AttentionPlan, ...]  # one for all layers, or one for each

    def __post_init__(self) -> None:
        num_layers = len(self.k_caches)
        if len(self.v_caches) != num_layers:
            raise ValueError(f"{num_layers} key caches but {len(self.v_caches)} value caches")
        if isinstance(self.plans, tuple) and len(self.plans) != num_layers:
            raise ValueError(f"{len(self.plans)} plans for {num_layers} layers")

    def attend(
        self,
        layer_idx: int,
        q: torch.Tensor,  # [T, Hq, D]
        k: torch.Tensor,  # [T, Hk, D]
        v: torch.Tensor,  # [T, Hk, D]
        *,
        scale: float,
        window: int,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the operator into a new buffer. Raises ValueError for shapes that do not agree."""
        plans = self.plans
        plan = plans[layer_idx] if isinstance(plans, tuple) else plans
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_attention(
            q,
            k,
            v,
            self.k_caches[layer_idx],
            self.v_caches[layer_idx],
            out,
            self.kv_indices,
            self.seq_starts,
            self.kv_lens,
            self.block_tables,
            sinks,
            scale,
            soft_cap,
            window,
            plan.as_ints(),
        )
        return out


_CONTEXT: Final[ContextVar[AttentionContext]] = ContextVar("graphseed_attention")


@contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    """Make `context` the one that models attend with inside the block, on this thread."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def register() -> str:
    """Make the attention known to transformers; return its name. May be called again.

    No mask is registered for the name: transformers then builds none, and causality, windows and
    lengths stay with the operator.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, hf_attention)
    return ATTENTION_NAME


def hf_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hk, T, D]
    value: torch.Tensor,  # [1, Hk, T, D]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for a Hugging Face layer through the current context; returns [1, T, Hq, D], None.

    Raises ModelUnsupported for what the operator would compute wrongly, RuntimeError outside an
    `attention_context`.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is not None or dropout or not is_causal:
        _refuse(module, attention_mask, dropout)
    if query.shape[0] != 1 or query.shape[3] != value.shape[3]:
        _refuse_shapes(module, query, value)
    for name in _MEANINGFUL:
        if extra.get(name) is not None:
            _unsupported(module, f"passes {name}, which paged attention does not have")
    context = _CONTEXT.get(None)
    if context is None:
        raise RuntimeError(
            f"{type(module).__name__} attends outside an attention context; run the model inside "
            "`with attention_context(step):`"
        )
    out = context.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        soft_cap=softcap or 0.0,
        sinks=s_aux,
    )
    return out[None], None


def _refuse(module: torch.nn.Module, mask: torch.Tensor | None, dropout: float) -> NoReturn:
    if mask is not None:
        _unsupported(module, f"passes an attention mask of shape {list(mask.shape)}; expected none")
    if dropout:
        _unsupported(module, f"asks for dropout {dropout}; call model.eval() first")
    _unsupported(module, "is not causal; only causal decoders attend over paged K/V")


def _refuse_shapes(module: torch.nn.Module, query: torch.Tensor, value: torch.Tensor) -> NoReturn:
    if query.shape[0] != 1:
        _unsupported(
            module, f"got a batch of {query.shape[0]}; pack all tokens of a step into one row"
        )
    _unsupported(
        module,
        f"has value heads of {value.shape[3]} beside query heads of {query.shape[3]}; "
        "paged K/V needs the two equal",
    )


def _unsupported(module: torch.nn.Module, why: str) -> NoReturn:
    raise ModelUnsupported(f"{type(module).__name__} {why}")
