"""What a model's attention is called with, learnt from the model itself.

Owns the one forward on fake tensors (nothing is executed, no memory is taken), the module being
as it was before it, and the judgement whether the engine can run this model rightly. Does not know
architectures: whatever calls our attention once a layer, with shapes we can keep, is fine.

Shapes: T tokens, Hq and Hk heads, D head dim.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from graphseed.models.attention import attention_context
from graphseed.models.errors import ModelUnsupported
from graphseed.models.heads import is_reranker
from graphseed.models.model import LayerShape

_NUM_TOKENS: Final = 8
_KNOWN_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_PLAIN_VALUES: Final = (bool, int, float, complex, str, bytes)
_TORCH_PARTS: Final = ("_modules", "_buffers", "_parameters")  # where torch keeps them
_OTHERS: Final = sys.stdlib_module_names | {"torch"}  # loggers, locks: not the model's own state


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


@dataclass(frozen=True, slots=True)
class _Holder:
    """One place where a module keeps things, and what was in it."""

    name: str
    things: Any  # dict, list or set: the place itself
    before: Any  # a shallow copy

    @classmethod
    def of(cls, name: str, things: Any) -> "_Holder":
        kind = next(kind for kind in (dict, list, set) if isinstance(things, kind))
        return cls(name, things, kind(things))

    def changed(self) -> list[str]:
        """Names of what is new, gone, or another thing than before."""
        if isinstance(self.before, set):
            return [self.name] if self.things != self.before else []
        old, new = dict(_items(self.before)), dict(_items(self.things))
        keys = [key for key in new if key not in old or not _is_same(old[key], new[key])]
        keys += [key for key in old if key not in new]
        return [f"{self.name}.{key}" for key in keys]

    def restore(self) -> None:
        """Put back what was in it."""
        self.things.clear()
        if isinstance(self.before, list):
            self.things.extend(self.before)
        else:
            self.things.update(self.before)


def probe_layers(module: Any) -> tuple[LayerShape, ...]:
    """Run the module's forward once on fake tensors; returns the shape of each layer's attention.

    The module is as it was afterwards, whatever the forward did. Raises ModelUnsupported, with the
    reason, for a model that would not run rightly: layers that keep state elsewhere, other kinds of
    attention, a host that waits for the device or keeps something from step to step.
    """
    config = module.config.get_text_config()
    _check_config(config)
    recorder = _Recorder()
    holders = list(_holders(module))
    try:
        _forward_fake(module, recorder)
    except ModelUnsupported:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelUnsupported(
            f"its forward reads a tensor's value on the host ({error}); such a step can be "
            f"neither captured nor run ahead of the device{_rope_hint(config)}"
        ) from error
    except Exception as error:
        first_line = (str(error).splitlines() or ["no message"])[0]
        raise ModelUnsupported(
            f"its forward fails on a packed step without a mask or a cache of transformers: "
            f"{type(error).__name__}: {first_line}"
        ) from error
    finally:
        changed = _put_back(holders)
    if changed:
        raise ModelUnsupported(
            f"its forward changes the module ({', '.join(changed[:4])}): a replay would not, and "
            "the next step would see what another one left"
        )
    layers = _in_order(recorder.layers, config.num_hidden_layers)
    _check_windows(layers, config)
    return layers


def _holders(module: Any) -> Iterator[_Holder]:
    """Every place that is reached from the module: attributes, containers, objects of its own."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", module)]
    while todo:
        name, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set)):
            things: Any = value
            yield _Holder.of(name, things)
        elif isinstance(value, tuple):
            things = value
        elif _is_own(value):
            things = vars(value)
            yield _Holder.of(name, things)
        else:
            continue
        todo += [(f"{name}.{key}".lstrip("."), inner) for key, inner in _items(things)]


def _is_own(value: Any) -> bool:
    """Whether an object's attributes belong to the model, rather than to a library below it."""
    if isinstance(value, (torch.Tensor, type)) or not hasattr(value, "__dict__"):
        return False
    package = type(value).__module__.partition(".")[0]
    return isinstance(value, torch.nn.Module) or package not in _OTHERS


def _items(things: Any) -> list[tuple[Any, Any]]:
    return list(things.items() if isinstance(things, dict) else enumerate(things))


def _is_same(old: Any, new: Any) -> bool:
    is_plain = type(old) is type(new) and isinstance(old, _PLAIN_VALUES)
    return old is new or (is_plain and bool(old == new))


def _put_back(holders: Sequence[_Holder]) -> list[str]:
    """Make every place hold what it held; returns the names of what had changed."""
    changed: list[str] = []
    for holder in holders:
        if names := holder.changed():
            holder.restore()
            changed += [
                ".".join(part for part in name.split(".") if part and part not in _TORCH_PARTS)
                for name in names
            ]
    return changed


def _forward_fake(module: Any, recorder: _Recorder) -> None:
    device = next(module.parameters()).device
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), fake_mode, attention_context(recorder):
        numbers = torch.zeros(1, _NUM_TOKENS, dtype=torch.int32, device=device)
        if is_reranker(module):  # its head runs outside the step
            module.base_model(input_ids=numbers, position_ids=numbers, use_cache=False)
            return
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
    _check_rope(config)
    others = {kind for kind in getattr(config, "layer_types", None) or ()} - _KNOWN_LAYER_TYPES
    if others:
        raise ModelUnsupported(
            f"this {config.model_type} has layers of kind {', '.join(sorted(map(str, others)))}; "
            f"graphseed runs {', '.join(sorted(_KNOWN_LAYER_TYPES))} only"
        )


def _check_rope(config: Any) -> None:
    context_len = getattr(config, "max_position_embeddings", None) or 0
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if rope.get("rope_type") == "longrope" and context_len > (original or 0):
            raise ModelUnsupported(
                f"its rotary embedding is of type 'longrope', for a context of {context_len} where "
                f"it was trained for {original}: the frequencies of every token then follow from "
                "the largest position of the forward, so a prompt in chunks would get other values "
                "than a whole one. Take the variant of the model with the short context (its "
                "rotary embedding is of type 'default')"
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
    kinds = {str(rope.get("rope_type")) for rope in _ropes(config)} & {"dynamic", "longrope"}
    return f" (rotary embedding of type {', '.join(map(repr, sorted(kinds)))})" if kinds else ""


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary embeddings of a config: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]
