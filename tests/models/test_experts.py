"""How experts are computed: what can be recorded, unless it would gather too much."""

import logging

import pytest
import torch

from graphseed.models import experts
from graphseed.models.experts import choose_experts, gathered_bytes
from graphseed.models.load import load_model
from graphseed.models.model import Model


def _load(preset: str, dtype: str) -> Model:
    return load_model(f"random:{preset}", device="cpu", dtype=dtype, bf16_is_fast=False)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bf16", "grouped_mm"), ("fp32", "batched_mm"), ("fp16", "batched_mm")]
)
def test_the_dtype_chooses(dtype: str, expected: str) -> None:
    config = _load("tiny-qwen3-moe", dtype).module.config
    assert config._experts_implementation == expected


def test_a_dense_model_has_no_choice_to_make() -> None:
    model = _load("tiny-llama", "fp32")
    assert choose_experts(model.module, torch.float32) is None


def test_gathered_bytes_count_both_projections_of_each_chosen_expert() -> None:
    model = _load("tiny-qwen3-moe", "fp32")
    per_expert = (2 * 64 * 64 + 64 * 64) * 4  # gate and up, then down, of 64 by 64, in fp32
    assert gathered_bytes(model.module, num_experts=8, num_chosen=2) == per_expert * 2 * 512


def test_too_much_to_gather_gives_up_capture_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experts, "_GATHER_LIMIT_BYTES", 1)
    with caplog.at_level(logging.WARNING):
        model = _load("tiny-qwen3-moe", "fp32")
    assert model.module.config._experts_implementation == "grouped_mm"
    assert "take bf16 to replay" in caplog.text
