"""Random weights: seeded, finite, of some variety, and nobody else's random state is touched."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from graphseed.models import random_weights
from graphseed.models.attention import attention_context
from graphseed.models.errors import ModelError
from graphseed.models.load import load_model, random_model
from graphseed.models.model import Model
from graphseed.models.presets import PRESET_NAMES, preset_config
from graphseed.models.random_weights import random_module
from tests.models.causal import CausalAttention

_TINY = [n for n in PRESET_NAMES if n.startswith("tiny-") and not n.endswith("-reranker")]
_CPU = torch.device("cpu")
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
_GPT: dict[str, Any] = {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4}
_OPT: dict[str, Any] = {"ffn_dim": 128, "word_embed_proj_dim": 64}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Families whose parameters transformers makes as bare memory: norms of torch, sinks, biases.
_FAMILIES = [
    AutoConfig.for_model("gpt2", **_GPT),
    AutoConfig.for_model("gpt_neox", **_SIZES),
    AutoConfig.for_model("opt", **_SIZES | _OPT),
    AutoConfig.for_model("stablelm", **_SIZES),
    AutoConfig.for_model("nemotron", **_SIZES),
    AutoConfig.for_model("phi", **_SIZES),
    AutoConfig.for_model("apertus", **_SIZES),
    AutoConfig.for_model("gpt_oss", **_SIZES | _EXPERTS, head_dim=16),
    AutoConfig.for_model("vaultgemma", **_SIZES, head_dim=16),
]


def _load(preset: str, dtype: str = "fp32", seed: int = 0) -> Model:
    return load_model(f"random:{preset}", device="cpu", dtype=dtype, bf16_is_fast=False, seed=seed)


@pytest.mark.parametrize("preset", _TINY)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_equal_seeds_give_equal_weights_and_another_seed_others(preset: str, dtype: str) -> None:
    first, again = _load(preset, dtype).module, _load(preset, dtype).module
    other = _load(preset, dtype, seed=1).module
    for (name, weight), same, differs in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(weight, same), name
        if weight.dim() >= 2:
            assert not torch.equal(weight, differs), name


def test_the_callers_random_state_is_untouched() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    _load("tiny-llama")
    assert torch.equal(torch.get_rng_state(), before)


def test_buffers_have_their_values_and_ties_hold() -> None:
    module = _load("tiny-gemma3").module
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight
    embed_scale = module.get_input_embeddings().embed_scale
    assert embed_scale.item() == pytest.approx(64**0.5)  # printed value of a square root
    assert all(bool(buffer.isfinite().all()) for buffer in module.buffers())


@pytest.mark.parametrize("preset", _TINY)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_logits_are_finite_and_greedy_output_has_some_variety(preset: str, dtype: str) -> None:
    model = _load(preset, dtype)
    ids = model.encode("The quick brown fox")
    num_prompt = len(ids)
    with torch.no_grad(), attention_context(CausalAttention()):
        for _ in range(16):
            rows = torch.tensor([len(ids) - 1], dtype=torch.int32)
            positions = torch.arange(len(ids), dtype=torch.int32)
            logits = model.forward(torch.tensor(ids, dtype=torch.int32), positions, rows)
            assert logits.isfinite().all()
            ids.append(int(logits[0].argmax()))
    assert len(set(ids[num_prompt:])) >= 6


def _poison_free_memory() -> None:
    """Leave memory of the sizes of small parameters full of NaN for who takes it next."""
    held = [torch.full((size,), float("nan")) for size in (4, 64, 128, 192, 256, 300)]
    held += [torch.full_like(tensor, float("nan")) for tensor in held for _ in range(100)]
    del held


@pytest.mark.parametrize("config", _FAMILIES, ids=lambda config: config.model_type)
def test_no_parameter_is_left_as_the_memory_was_found(config: Any) -> None:
    made = []
    for _ in range(2):
        _poison_free_memory()
        made.append(random_model(copy.deepcopy(config), device="cpu").module)
    for (name, one), other in zip(made[0].named_parameters(), made[1].parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.isfinite().all(), name


@pytest.mark.parametrize("config", _FAMILIES[:7], ids=lambda config: config.model_type)
def test_other_families_have_finite_logits_that_follow_from_the_token(config: Any) -> None:
    model = random_model(copy.deepcopy(config), device="cpu")
    ids = torch.arange(8, dtype=torch.int32)
    with torch.no_grad(), attention_context(CausalAttention()):
        logits = model.forward(ids, ids, ids)
    assert logits.isfinite().all()
    assert len({tuple(row.tolist()) for row in logits}) == len(ids)


def _scales_of(model_type: str, name: str) -> torch.Tensor:
    config = AutoConfig.for_model(model_type, **_SIZES)
    weight: torch.Tensor = random_model(config, device="cpu").module.get_parameter(name)
    return weight


def test_a_norm_starts_as_its_class_means_it() -> None:
    """At one, or at zero where it scales by 1 + w."""
    assert _scales_of("stablelm", "model.norm.weight").eq(1).all()
    assert _scales_of("nemotron", "model.norm.weight").eq(0).all()
    assert _scales_of("gemma", "model.norm.weight").eq(0).all()
    assert _scales_of("llama", "model.norm.weight").eq(1).all()


def test_a_parameter_that_its_class_computes_keeps_its_value() -> None:
    alpha = _scales_of("apertus", "model.layers.0.mlp.act_fn.alpha_p")
    assert torch.nn.functional.softplus(alpha).item() == pytest.approx(0.8)  # xIELU's own start


def test_parameters_drawn_from_the_global_state_are_drawn_again() -> None:
    with random_weights._Untold() as untold:
        drawn, kept = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.ones(3))
        filled = torch.empty(3).fill_(2.0)
        bare = torch.empty(3)
    assert drawn in untold and bare in untold
    assert kept not in untold and filled not in untold


def _raise(error: RuntimeError) -> Any:
    def draw(*args: object) -> None:
        raise error

    return draw


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_too_little_memory_says_how_much_is_needed_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    monkeypatch.setattr(random_weights, "_draw", _raise(error))
    # 229,952 weights of 4 bytes
    with pytest.raises(ModelError, match=r"919,808 bytes .* in float32.*or the dtype bf16"):
        random_module(preset_config("tiny-llama"), _CPU, torch.float32, 0)


def test_another_runtime_error_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "_draw", _raise(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        random_module(preset_config("tiny-llama"), _CPU, torch.float32, 0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_weights_on_a_gpu_are_made_there_and_leave_its_random_state() -> None:
    before_cpu, before_gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    made = [
        load_model("random:tiny-qwen3-moe", device="cuda:0", bf16_is_fast=True) for _ in range(2)
    ]
    assert torch.equal(torch.get_rng_state(), before_cpu)
    assert torch.equal(torch.cuda.get_rng_state(), before_gpu)
    for one, other in zip(*(model.module.parameters() for model in made), strict=True):
        assert one.device == torch.device("cuda:0")
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
