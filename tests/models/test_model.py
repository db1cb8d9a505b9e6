"""A ready model: its forward, its text in and out, what its publisher says of sampling."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GenerationConfig

from graphseed.models.attention import attention_context
from graphseed.models.errors import ModelError
from graphseed.models.load import random_model
from graphseed.models.model import Model, SamplingDefaults, eos_ids_of, sampling_defaults_of
from graphseed.models.presets import preset_config
from tests.models.causal import CausalAttention

_FAMILIES = ["tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe"]
_NUM_TOKENS = 64  # more than the window of tiny-gemma3


def _random(preset: str, dtype: str = "fp32") -> Model:
    return random_model(preset_config(preset), device="cpu", dtype=dtype)


def _forward(model: Model, ids: torch.Tensor, rows: list[int]) -> torch.Tensor:
    positions = torch.arange(len(ids), dtype=torch.int32)
    with torch.no_grad(), attention_context(CausalAttention()):
        return model.forward(ids, positions, torch.tensor(rows, dtype=torch.int32))


def _ids(num_tokens: int = _NUM_TOKENS) -> torch.Tensor:
    return (torch.arange(num_tokens, dtype=torch.int32) * 37) % 256


@pytest.mark.parametrize("preset", _FAMILIES)
def test_forward_gives_the_logits_of_the_plain_model_at_the_rows_asked_for(preset: str) -> None:
    model = _random(preset)
    plain = AutoModelForCausalLM.from_config(
        preset_config(preset), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    plain.load_state_dict(model.module.state_dict())
    rows = [63, 0, 41]
    with torch.no_grad():
        want = plain(input_ids=_ids()[None].long(), use_cache=False).logits[0, rows]
    got = _forward(model, _ids(), rows)
    assert got.shape == (3, model.vocab_size)
    # Another attention kernel and another shape of the head's product: rounding of float32.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", _FAMILIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_logits_have_the_models_dtype_and_no_gradient(preset: str, dtype: str) -> None:
    model = _random(preset, dtype)
    with attention_context(CausalAttention()):
        logits = model.forward(_ids(), _ids(), torch.tensor([1], dtype=torch.int32))
    assert logits.dtype == model.dtype
    assert not logits.requires_grad


class _Operations(TorchDispatchMode):
    """Notes every operation that makes a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.Size, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = any(result.alias_info for result in func._schema.returns)
        if isinstance(out, torch.Tensor) and not is_view:
            self.seen.append((func.name().replace("::", "."), out.shape, out.dtype))
        return out


def _operations_of(
    model: Model, num_tokens: int, rows: list[int]
) -> list[tuple[str, torch.Size, torch.dtype]]:
    ids, positions = _ids(num_tokens), torch.arange(num_tokens, dtype=torch.int32)
    logits_rows = torch.tensor(rows, dtype=torch.int32)
    with torch.no_grad(), attention_context(CausalAttention()), _Operations() as operations:
        model.forward(ids, positions, logits_rows)
    return operations.seen


@pytest.mark.parametrize("preset", _FAMILIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_declared_first_node_is_the_first_operation(preset: str, dtype: str) -> None:
    model = _random(preset, dtype)
    operations = _operations_of(model, 16, [15])
    first = model.first_node(16)
    name, shape, kind = operations[0]
    assert (first.operation, first.shape, getattr(torch, first.dtype)) == (name, shape, kind)


def test_the_head_reads_only_the_rows_asked_for() -> None:
    model = _random("tiny-llama")
    operations = _operations_of(model, _NUM_TOKENS, [5, 6])
    wide = [shape for _, shape, _ in operations if shape[-1:] == (model.vocab_size,)]
    assert wide
    assert all(shape.numel() == 2 * model.vocab_size for shape in wide)


def test_weights_are_frozen_and_counted_once_when_tied() -> None:
    model = _random("tiny-llama")
    assert not any(weight.requires_grad for weight in model.module.parameters())
    assert not model.module.training
    assert model.num_parameters == 229_952
    assert model.weight_bytes == 4 * 229_952


def test_text_goes_in_and_comes_out() -> None:
    model = _random("tiny-llama")
    assert model.encode("héllo") == list("héllo".encode())
    assert model.decode(model.encode("héllo <|eos|>")) == "héllo <|eos|>"
    assert model.decode([*b"hi", 257, 258]) == "hi"


def test_a_long_text_is_encoded_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    model = _random("tiny-llama")
    model.tokenizer.model_max_length = 8
    assert len(model.encode("x" * 100)) == 100
    assert not caplog.records


def test_without_a_template_a_conversation_is_its_contents() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi"}]
    model = _random("tiny-llama")
    assert model.decode(model.chat(messages)) == "Be brief. Hi"


def test_a_chat_template_is_applied_up_to_the_answer() -> None:
    model = _random("tiny-llama")
    model.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    text = model.decode(model.chat([{"role": "user", "content": "Hi"}]))
    assert text == "[user]Hi[assistant]"


def test_a_template_that_refuses_is_a_clear_error() -> None:
    model = _random("tiny-llama")
    model.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ModelError, match="refused the conversation: roles must alternate"):
        model.chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("by_generation", "by_config", "expected"),
    [
        (5, None, {5}),
        ([5, 6], 7, {5, 6, 7}),
        (None, [7], {7}),
        (None, None, {257}),  # neither says: the tokenizer's
    ],
)
def test_eos_ids_come_from_generation_config_and_config(
    by_generation: Any, by_config: Any, expected: set[int]
) -> None:
    model = _random("tiny-llama")
    model.module.generation_config = GenerationConfig(eos_token_id=by_generation)
    model.module.config.eos_token_id = by_config
    assert eos_ids_of(model.module, model.tokenizer) == expected


def test_sampling_defaults_come_from_generation_config() -> None:
    model = _random("tiny-llama")
    assert sampling_defaults_of(model.module) == model.sampling == SamplingDefaults()
    model.module.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1
    )
    assert sampling_defaults_of(model.module) == SamplingDefaults(True, 0.6, 20, 0.95, 0.05, 1.1)


def test_a_model_is_itself_and_no_other() -> None:
    model = _random("tiny-llama")
    assert model == model
    assert model != replace(model)
