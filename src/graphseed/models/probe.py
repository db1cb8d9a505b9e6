"""What a model's attention is called with, learnt from the model itself.

Owns the one forward on fake tensors (nothing is executed, no memory is taken) and the judgement
whether the engine can run this model rightly. Does not know architectures: whatever calls our
attention once a layer, with shapes we can keep, is fine.

Shapes: T tokens, Hq and Hk heads, D head dim.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from graphseed.models.attention import attention_context
from graphseed.models.errors import ModelUnsupported
from graphseed.models.model import LayerShape

_NUM_TOKENS: Final = 8
_KNOWN_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})


class _Recorder:
    """An attention context that notes how each layer calls, and attends to nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self,
        layer_idx: int,
        q: torch.Tensor,  # [T, Hq, D]
        k: torch.Tensor,  # [T, Hk, D]
        v: torch.Tensor,
        *,
        scale: float,
        window: int,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if layer_idx in self.layers:
            raise ModelUnsupported(f"layer {layer_idx} attends twice: its K/V would be overwritten")
        if k.shape != v.shape:
            raise ModelUnsupported(
                f"layer {layer_idx} has keys of shape {list(k.shape)} and values of "
                f"{list(v.shape)}; graphseed keeps K and V of one shape only"
            )
        if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
            raise ModelUnsupported(
                f"layer {layer_idx} attends with queries {list(q.shape)} to keys {list(k.shape)}"
            )
        self.layers[layer_idx] = LayerShape(
            num_q_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            window=window,
            scale=scale,
            soft_cap=soft_cap,
            has_sinks=sinks is not None,
        )
        return torch.empty_like(q)


def probe_layers(module: Any) -> tuple[LayerShape, ...]:
    """Run the module's forward once on fake tensors; returns the shape of each layer's attention.

    Raises ModelUnsupported, with the reason, for a model that would not run rightly: layers that
    keep state elsewhere, other kinds of attention, a host that waits for the device.
    """
    config = module.config.get_text_config()
    _check_config(config)
    recorder = _Recorder()
    try:
        _forward_fake(module, recorder)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelUnsupported(
            f"its forward reads a tensor's value on the host ({error}); such a step can be "
            f"neither captured nor run ahead of the device{_rope_hint(config)}"
        ) from error
    if any(isinstance(buffer, FakeTensor) for buffer in module.buffers()):
        raise ModelUnsupported("its forward replaces a buffer of the module: it keeps state")
    layers = _in_order(recorder.layers, config.num_hidden_layers)
    _check_windows(layers, config)
    return layers


def _forward_fake(module: Any, recorder: _Recorder) -> None:
    device = next(module.parameters()).device
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), fake_mode, attention_context(recorder):
        numbers = torch.zeros(1, _NUM_TOKENS, dtype=torch.int32, device=device)
        module(
            input_ids=numbers,
            position_ids=numbers,
            use_cache=False,
            logits_to_keep=torch.zeros(1, dtype=torch.int32, device=device),
        )


def _check_config(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{config.model_type} is an encoder-decoder, not a causal model")
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelUnsupported(f"this {config.model_type} attends to what comes after (not causal)")
    if shared := getattr(config, "num_kv_shared_layers", 0):
        raise ModelUnsupported(
            f"{shared} layers of this {config.model_type} read the K/V of other layers"
        )
    others = {kind for kind in getattr(config, "layer_types", None) or ()} - _KNOWN_LAYER_TYPES
    if others:
        raise ModelUnsupported(
            f"this {config.model_type} has layers of kind {', '.join(sorted(map(str, others)))}; "
            f"graphseed runs {', '.join(sorted(_KNOWN_LAYER_TYPES))} only"
        )


def _in_order(seen: dict[int, LayerShape], num_layers: int) -> tuple[LayerShape, ...]:
    if not seen:
        raise ModelUnsupported(
            "it never calls the attention function that it is given: its class has an attention of "
            "its own"
        )
    missing = [idx for idx in range(num_layers) if idx not in seen]
    if missing:
        raise ModelUnsupported(
            f"layers {missing} of {num_layers} do not call the attention function: their state "
            "would be lost between chunks"
        )
    if len(seen) != num_layers:
        extra = sorted(set(seen) - set(range(num_layers)))
        raise ModelUnsupported(f"attention was called for layers {extra} beyond the {num_layers}")
    return tuple(seen[idx] for idx in range(num_layers))


def _check_windows(layers: Sequence[LayerShape], config: Any) -> None:
    """A window that the config promises and the attention never hears of would be wrong."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        deaf = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        deaf = [i for i in deaf if not layers[i].window]
    else:
        promised = getattr(config, "sliding_window", None)
        promised = promised if getattr(config, "use_sliding_window", True) else None
        deaf = [i for i, layer in enumerate(layers) if promised and not layer.window]
    if deaf:
        raise ModelUnsupported(
            f"layers {deaf} have a sliding window by the config but do not hand it to the attention"
        )


def _rope_hint(config: Any) -> str:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    return f" (rotary embedding of type {kind!r})" if kind in ("dynamic", "longrope") else ""
