"""How experts are computed: what can be recorded, unless it would gather too much."""

import logging

import pytest
import torch

from graphseed.models import experts
from graphseed.models.attention import attention_context
from graphseed.models.experts import choose_experts, gathered_bytes
from graphseed.models.load import load_model
from graphseed.models.model import Model
from tests.drivers.replaying import check_replays
from tests.models.causal import CausalAttention

_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _load(preset: str, dtype: str) -> Model:
    return load_model(f"random:{preset}", device="cpu", dtype=dtype, bf16_is_fast=False)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_the_cpu_multiplies_in_groups_in_every_dtype(dtype: str) -> None:
    config = _load("tiny-qwen3-moe", dtype).module.config
    assert config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("dtype", _DTYPES)
def test_what_the_cpu_is_given_can_be_recorded_and_replays_bitwise(dtype: str) -> None:
    model = _load("tiny-qwen3-moe", dtype)
    ids, rows = torch.zeros(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    seen = []

    def renew(launch: int) -> None:
        ids.copy_(torch.randint(0, 256, (8,), generator=torch.Generator().manual_seed(launch)))
        seen.append(ids.clone())

    with attention_context(CausalAttention()):
        executable = check_replays(lambda: model.forward(ids, rows, rows), [ids], renew)
    assert len({tuple(step.tolist()) for step in seen}) == len(seen)  # experts were chosen anew
    logits = executable.result
    assert isinstance(logits, torch.Tensor)
    assert logits.isfinite().all() and logits.any()


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bf16", "grouped_mm"), ("fp32", "batched_mm"), ("fp16", "batched_mm")]
)
def test_on_a_gpu_the_dtype_chooses(dtype: str, expected: str) -> None:
    module = _load("tiny-qwen3-moe", dtype).module
    assert choose_experts(module, _GPU, _DTYPES[dtype]) == expected


@pytest.mark.parametrize("device", [_CPU, _GPU])
def test_a_dense_model_has_no_choice_to_make(device: torch.device) -> None:
    model = _load("tiny-llama", "fp32")
    assert choose_experts(model.module, device, torch.float32) is None


def test_gathered_bytes_count_both_projections_of_each_chosen_expert() -> None:
    model = _load("tiny-qwen3-moe", "fp32")
    per_expert = (2 * 64 * 64 + 64 * 64) * 4  # gate and up, then down, of 64 by 64, in fp32
    assert gathered_bytes(model.module, num_experts=8, num_chosen=2) == per_expert * 2 * 512


def test_too_much_to_gather_on_a_gpu_gives_up_capture_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experts, "_GATHER_LIMIT_BYTES", 1)
    with caplog.at_level(logging.WARNING):
        module = _load("tiny-qwen3-moe", "fp32").module
        assert caplog.text == ""  # nothing is given up on the cpu
        assert choose_experts(module, _GPU, torch.float32) == "grouped_mm"
    assert "float32 on cuda:0" in caplog.text
    assert "take bf16 to replay" in caplog.text
