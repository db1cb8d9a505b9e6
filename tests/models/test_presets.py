"""Presets have the published shapes."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graphseed.models.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID
from graphseed.models.errors import ModelNotFound
from graphseed.models.presets import PRESET_NAMES, preset_config


def _num_parameters(config: Any) -> int:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    module.tie_weights()
    return sum(weight.numel() for weight in module.parameters())


@pytest.mark.parametrize(
    ("preset", "overrides", "published"),
    [
        ("smollm2-135m", {}, 134_515_008),
        ("qwen3-0.6b", {}, 596_049_920),
        ("llama3.2-1b", {}, 1_235_814_400),
        ("llama3-8b", {}, 8_030_261_248),
        ("gemma3-270m", {}, 268_098_176),
        ("qwen3-moe-16l", {"num_hidden_layers": 48}, 30_532_122_624),  # the whole Qwen3-30B-A3B
    ],
)
def test_a_preset_has_as_many_weights_as_the_published_model(
    preset: str, overrides: dict[str, Any], published: int
) -> None:
    assert _num_parameters(preset_config(preset, **overrides)) == published


def test_gemma_has_a_full_layer_after_every_five_sliding_ones() -> None:
    kinds = preset_config("gemma3-270m").layer_types
    assert [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"] == [6, 12, 18]


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_the_special_ids_are_the_byte_tokenizers(preset: str) -> None:
    config = preset_config(preset)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
        BOS_ID,
        EOS_ID,
        PAD_ID,
    )


def test_overrides_win_and_the_layer_types_follow_the_number_of_layers() -> None:
    config = preset_config("tiny-gemma3", num_hidden_layers=2, vocab_size=300)
    assert config.vocab_size == 300
    assert config.layer_types == ["sliding_attention"] * 2


def test_one_config_does_not_change_the_next() -> None:
    first = preset_config("llama3.2-1b")
    first.rope_parameters["factor"] = 1.0
    assert preset_config("llama3.2-1b").rope_parameters["factor"] == 32.0


def test_an_unknown_preset_lists_those_there_are() -> None:
    with pytest.raises(ModelNotFound, match="no preset 'llama9'; there are smollm2-135m, qwen3"):
        preset_config("llama9")
