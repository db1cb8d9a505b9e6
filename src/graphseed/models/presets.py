"""Published architectures by name, for random weights: `random:PRESET`.

Owns the shapes, as their publishers give them. Does not make weights. The vocabulary is the real
one, but the special ids are the byte tokenizer's. The `tiny-` presets are nobody's: they have the
structure of a family at the size of a test.
"""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from graphseed.models.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID
from graphseed.models.errors import ModelNotFound
from graphseed.models.resolve import RANDOM_PREFIX

_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"

# model_type, then the fields of that type's config.
_PRESETS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "smollm2-135m": (
            "llama",
            {
                "hidden_size": 576,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "intermediate_size": 1536,
                "vocab_size": 49152,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
                "tie_word_embeddings": True,
            },
        ),
        "qwen3-0.6b": (
            "qwen3",
            {
                "hidden_size": 1024,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 3072,
                "vocab_size": 151936,
                "max_position_embeddings": 40960,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "tie_word_embeddings": True,
            },
        ),
        "llama3.2-1b": (
            "llama",
            {
                "hidden_size": 2048,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "intermediate_size": 8192,
                "vocab_size": 128256,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500_000.0,
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
                "tie_word_embeddings": True,
            },
        ),
        "llama3-8b": (
            "llama",
            {
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 128256,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
                "tie_word_embeddings": False,
            },
        ),
        "gemma3-270m": (
            "gemma3_text",
            {
                "hidden_size": 640,
                "num_hidden_layers": 18,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "intermediate_size": 2048,
                "vocab_size": 262144,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "query_pre_attn_scalar": 256,
                "sliding_window": 512,
                "layer_types": [*[_SLIDING] * 5, _FULL] * 3,
                "tie_word_embeddings": True,
            },
        ),
        "qwen3-moe-16l": (  # Qwen3-30B-A3B, the first 16 of its 48 layers
            "qwen3_moe",
            {
                "hidden_size": 2048,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "vocab_size": 151936,
                "max_position_embeddings": 40960,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "tie_word_embeddings": False,
            },
        ),
    }
)

_TINY: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
)

_TINY_PRESETS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "tiny-llama": ("llama", {}),
        "tiny-qwen3": ("qwen3", {}),
        "tiny-qwen3-reranker": (
            "qwen3",
            {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1},
        ),
        "tiny-gemma3": (
            "gemma3_text",
            {
                "query_pre_attn_scalar": 32,
                "sliding_window": 40,
                "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
            },
        ),
        "tiny-qwen3-moe": (
            "qwen3_moe",
            {
                "moe_intermediate_size": 64,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "tie_word_embeddings": False,
            },
        ),
    }
)

PRESET_NAMES: Final = (*_PRESETS, *_TINY_PRESETS)


def preset_config(preset: str, **overrides: Any) -> Any:
    """Make the transformers config of a preset, `overrides` over its fields.

    Fewer layers take the first ones of the preset; the layer types are cut to match. Raises
    ModelNotFound, with the presets there are.
    """
    from transformers import AutoConfig

    if preset in _PRESETS:
        model_type, own = _PRESETS[preset]
        fields = copy.deepcopy(dict(own))  # transformers writes into nested values
    elif preset in _TINY_PRESETS:
        model_type, own = _TINY_PRESETS[preset]
        fields = copy.deepcopy({**_TINY, **own})
    else:
        why = f"there is no preset {preset!r}; there are {', '.join(PRESET_NAMES)}"
        raise ModelNotFound(f"{RANDOM_PREFIX}{preset}", [("presets of random weights", why)])
    fields |= {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    fields |= overrides
    if "layer_types" in fields and "layer_types" not in overrides:
        fields["layer_types"] = list(fields["layer_types"][: fields["num_hidden_layers"]])
    return AutoConfig.for_model(model_type, **fields)
