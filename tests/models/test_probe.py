"""The probe: shapes come from the model itself, and what would run wrongly is refused."""

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
    PretrainedConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from graphseed.models.errors import ModelUnsupported
from graphseed.models.load import load_model, random_model
from graphseed.models.model import LayerShape
from graphseed.models.presets import preset_config
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


def test_probing_executes_nothing_and_leaves_no_trace() -> None:
    module = load_model("random:tiny-gemma3", device="cpu", bf16_is_fast=False).module
    before = {name: (t.data_ptr(), t._version) for name, t in module.state_dict().items()}
    config = module.config.to_dict()
    probe_layers(module)
    assert {name: (t.data_ptr(), t._version) for name, t in module.state_dict().items()} == before
    assert module.config.to_dict() == config
    held = [*module.parameters(), *module.buffers()]
    assert not any(isinstance(tensor, FakeTensor) for tensor in held)
