"""The probe: shapes come from the model itself, and what would run wrongly is refused."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    BloomConfig,
    Cohere2Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from graphseed.models.errors import ModelUnsupported
from graphseed.models.experts import PROBE_EXPERTS
from graphseed.models.load import load_model, random_model
from graphseed.models.model import LayerShape
from graphseed.models.presets import PRESET_NAMES, preset_config
from graphseed.models.probe import probe_layers

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def _layers(config: PretrainedConfig, dtype: str = "fp32") -> tuple[LayerShape, ...]:
    return random_model(config, device="cpu", dtype=dtype).layers


@pytest.mark.parametrize(
    ("preset", "windows"),
    [
        ("tiny-llama", [0, 0, 0, 0]),
        ("tiny-qwen3", [0, 0, 0, 0]),
        ("tiny-gemma3", [40, 40, 40, 0]),
        ("tiny-qwen3-moe", [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_layer_tells_its_shape(preset: str, windows: list[int], dtype: str) -> None:
    layers = _layers(preset_config(preset), dtype)
    assert layers == tuple(LayerShape(4, 2, 32, window, scale=32**-0.5) for window in windows)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MistralConfig(**_SIZES, sliding_window=40), LayerShape(4, 2, 16, 40, 0.25)),
        (SmolLM3Config(**_SIZES), LayerShape(4, 2, 16, 0, 0.25)),
        (GraniteConfig(**_SIZES, attention_multiplier=0.5), LayerShape(4, 2, 16, 0, 0.5)),
        (Cohere2Config(**_SIZES, sliding_window=40), LayerShape(4, 2, 16, 40, 0.25)),
        (
            Gemma2Config(**_SIZES, head_dim=32, query_pre_attn_scalar=16, sliding_window=40),
            LayerShape(4, 2, 32, 40, 0.25, soft_cap=50.0),
        ),
        (
            MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
            LayerShape(4, 2, 16, 0, 0.25),
        ),
        (
            GptOssConfig(
                **_SIZES,
                head_dim=16,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=40,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            LayerShape(4, 2, 16, 40, 0.25, has_sinks=True),
        ),
        (
            GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=256),
            LayerShape(4, 4, 16, 0, 0.25),
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_the_first_layer_of_other_families(config: PretrainedConfig, expected: LayerShape) -> None:
    assert _layers(config, "bf16")[0] == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            LlamaConfig(
                **_SIZES,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            "reads a tensor's value on the host.*'dynamic'",
        ),
        (
            MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, state_size=8),
            "layers of kind linear_attention",
        ),
        (
            BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4),
            "never calls the attention function",
        ),
        (
            MptConfig(vocab_size=300, d_model=64, n_heads=4, n_layers=2, max_seq_len=256),
            "its forward fails .*: AttributeError: 'NoneType' object has no attribute 'to'",
        ),
        (
            FalconConfig(
                vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
            ),
            "cannot build it as a causal model: KeyError",
        ),
        (
            Qwen3NextConfig(
                **_SIZES,
                head_dim=16,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=64,
                layer_types=["linear_attention", "full_attention"],
            ),
            "layers of kind linear_attention",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_that_would_run_wrongly_is_refused_with_the_reason(
    config: PretrainedConfig, reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=reason):
        _layers(config, "bf16")


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="not causal"):
        _layers(preset_config("tiny-gemma3", use_bidirectional_attention=True))


def test_a_layer_that_attends_twice_is_refused() -> None:
    module = load_model("random:tiny-llama", device="cpu", bf16_is_fast=False).module
    module.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ModelUnsupported, match="layer 0 attends twice"):
        probe_layers(module)


def test_a_layer_that_keeps_its_window_to_itself_is_refused() -> None:
    module = load_model("random:tiny-gemma3", device="cpu", bf16_is_fast=False).module
    module.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(ModelUnsupported, match=r"layers \[1\] have a sliding window by the config"):
        probe_layers(module)


def test_values_narrower_than_keys_are_refused() -> None:
    module = load_model("random:tiny-llama", device="cpu", bf16_is_fast=False).module
    attention = module.model.layers[0].self_attn
    attention.v_proj = torch.nn.Linear(64, 16, bias=False)
    attention.forward = _with_narrow_values(attention)
    with pytest.raises(ModelUnsupported, match="keys|heads"):
        probe_layers(module)


def _with_narrow_values(attention: Any) -> Any:
    from graphseed.models.attention import hf_attention

    def forward(hidden_states: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        num_tokens = hidden_states.shape[1]
        q = attention.q_proj(hidden_states).view(1, num_tokens, 4, 32).transpose(1, 2)
        k = attention.k_proj(hidden_states).view(1, num_tokens, 2, 32).transpose(1, 2)
        v = attention.v_proj(hidden_states).view(1, num_tokens, 1, 16).transpose(1, 2)
        return hf_attention(attention, q, k, v, None, scaling=1.0)

    return forward


def _longrope(context_len: int, original_len: int) -> Phi3Config:
    return Phi3Config(
        **_SIZES | {"max_position_embeddings": context_len},
        original_max_position_embeddings=original_len,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": original_len,
        },
    )


def _inner(value: Any) -> Iterator[Any]:
    """Whatever the attributes of a module's parts hold, containers opened."""
    if isinstance(value, torch.nn.Module):
        for part in value.modules():
            yield from _inner(vars(part))
    elif isinstance(value, dict):
        for item in value.values():
            yield from () if isinstance(item, torch.nn.Module) else _inner(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from () if isinstance(item, torch.nn.Module) else _inner(item)
    else:
        yield value


def _holds_fake(module: Any) -> bool:
    return any(isinstance(value, FakeTensor) for value in _inner(module))


def _small() -> Any:
    return load_model("random:tiny-llama", device="cpu", bf16_is_fast=False).module


def test_longrope_is_refused_where_the_context_exceeds_what_it_was_trained_for() -> None:
    with pytest.raises(ModelUnsupported, match="'longrope'.*256.*128.*Take the variant"):
        _layers(_longrope(256, 128))


def test_a_longrope_module_that_keeps_its_frequencies_is_refused_and_left_clean() -> None:
    module = _small()
    module.model.rotary_emb = _KeepingRope(module.model.rotary_emb)
    for _ in range(2):  # the first refusal leaves nothing that would hide the second
        with pytest.raises(ModelUnsupported, match=r"changes the module \(model.rotary_emb.kept\)"):
            probe_layers(module)
        assert not _holds_fake(module)
        assert not hasattr(module.model.rotary_emb, "kept")


class _KeepingRope(torch.nn.Module):
    """Keeps a tensor as a plain attribute, as the longrope of transformers does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        result = self.inner(*args, **options)
        self.kept = result[0]
        return result


def _keep_in_list(layer: Any, hidden: torch.Tensor) -> None:
    layer.kept_list.append(hidden)


def _keep_in_nested(layer: Any, hidden: torch.Tensor) -> None:
    layer.kept_dict["a"]["b"] = (hidden,)


def _keep_in_buffer(layer: Any, hidden: torch.Tensor) -> None:
    layer.mark = hidden


def _keep_in_object(layer: Any, hidden: torch.Tensor) -> None:
    layer.config.kept = hidden


def _count(layer: Any, hidden: torch.Tensor) -> None:
    layer.steps += 1


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (_keep_in_list, "model.layers.0.mlp.kept_list.0"),
        (_keep_in_nested, "model.layers.0.mlp.kept_dict.a.b"),
        (_keep_in_buffer, "mlp.mark"),
        (_keep_in_object, "config.kept"),
        (_count, "model.layers.0.mlp.steps"),
    ],
)
def test_a_forward_that_keeps_anything_is_refused_and_undone(keep: Any, name: str) -> None:
    module = _small()
    layer = module.model.layers[0].mlp
    layer.kept_list, layer.kept_dict, layer.steps = [], {"a": {}}, 0
    layer.register_buffer("mark", torch.zeros(3))
    before, mark = _state(module), layer.mark
    forward = layer.forward

    def keeping(hidden: torch.Tensor) -> torch.Tensor:
        keep(layer, hidden)
        result: torch.Tensor = forward(hidden)
        return result

    layer.forward = keeping
    with pytest.raises(ModelUnsupported, match=rf"changes the module \([\w., ]*{name}"):
        probe_layers(module)
    del layer.forward
    assert _state(module) == before
    assert layer.mark is mark
    assert (layer.kept_list, layer.kept_dict, layer.steps) == ([], {"a": {}}, 0)
    assert not hasattr(layer.config, "kept")
    assert not _holds_fake(module)


def test_a_forward_that_fails_after_keeping_something_is_undone_too() -> None:
    module = _small()
    layer = module.model.layers[0].mlp

    def failing(hidden: torch.Tensor) -> torch.Tensor:
        layer.kept = hidden
        raise LookupError("no such thing\nand a second line")

    layer.forward = failing
    with pytest.raises(ModelUnsupported, match="LookupError: no such thing$"):
        probe_layers(module)
    assert not hasattr(layer, "kept")
    assert not _holds_fake(module)


def _state(module: Any) -> list[tuple[str, dict[str, int]]]:
    """For each part of a module, the identity of every attribute and of what its dicts hold."""
    return [
        (
            name,
            {key: id(value) for key, value in vars(part).items()}
            | {f"_buffers.{key}": id(value) for key, value in part._buffers.items()}
            | {f"_parameters.{key}": id(value) for key, value in part._parameters.items()},
        )
        for name, part in module.named_modules()
    ]


@pytest.mark.parametrize("preset", [name for name in PRESET_NAMES if name.startswith("tiny-")])
def test_a_supported_model_is_untouched_by_probing(preset: str) -> None:
    module = load_model(
        f"random:{preset}", device="cpu", bf16_is_fast=False, takes_rerankers=True
    ).module
    assert not _holds_fake(module)
    if preset == "tiny-qwen3-moe":  # what loading probes with
        module.set_experts_implementation(PROBE_EXPERTS)
    before, config = _state(module), copy.deepcopy(vars(module.config))
    probe_layers(module)
    assert _state(module) == before
    assert vars(module.config) == config
    assert not _holds_fake(module)


def test_probing_executes_nothing_and_leaves_no_trace() -> None:
    module = load_model("random:tiny-gemma3", device="cpu", bf16_is_fast=False).module
    before = {name: (t.data_ptr(), t._version) for name, t in module.state_dict().items()}
    config = module.config.to_dict()
    probe_layers(module)
    assert {name: (t.data_ptr(), t._version) for name, t in module.state_dict().items()} == before
    assert module.config.to_dict() == config
    held = [*module.parameters(), *module.buffers()]
    assert not any(isinstance(tensor, FakeTensor) for tensor in held)
