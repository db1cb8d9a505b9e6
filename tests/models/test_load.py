"""A name into a ready model, and every way in which that can fail."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config

import graphseed
from graphseed.models import folder as folder_module
from graphseed.models.attention import attention_context
from graphseed.models.errors import ModelError, ModelNotFound, ModelUnsupported
from graphseed.models.load import load_model, parse_dtype, random_model
from graphseed.models.model import Model, SamplingDefaults
from graphseed.models.presets import preset_config
from tests.models.causal import CausalAttention


def _load(name: str | Path, **options: Any) -> Model:
    return load_model(
        str(name), **{"device": "cpu", "bf16_is_fast": False, "offline": True, **options}
    )


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a tiny random model as a Hugging Face folder."""

    def save(preset: str = "tiny-llama", **overrides: Any) -> Path:
        model = random_model(preset_config(preset, **overrides), device="cpu", seed=3)
        folder = tmp_path / preset
        model.module.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe"])
def test_a_folder_gives_the_weights_that_were_saved(
    saved: Callable[..., Path], preset: str
) -> None:
    folder = saved(preset)
    model = _load(folder, dtype="fp32")
    same = random_model(preset_config(preset), device="cpu", seed=3)
    for (name, weight), want in zip(
        model.module.named_parameters(), same.module.parameters(), strict=True
    ):
        assert torch.equal(weight, want), name
    assert model.layers == same.layers
    assert model.source == str(folder)
    assert model.encode("abc") == same.encode("abc")


def test_a_model_says_what_the_engine_needs_to_know(saved: Callable[..., Path]) -> None:
    folder = saved()
    generation = {"eos_token_id": [257, 5], "do_sample": True, "temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = _load(folder)
    assert model.name == str(folder)
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    assert (model.vocab_size, model.context_len, model.hidden_size) == (512, 2048, 64)
    assert model.eos_ids == {257, 5}
    assert model.sampling == SamplingDefaults(do_sample=True, temperature=0.6, top_k=20)
    assert model.module.config._attn_implementation == "graphseed_paged"
    assert not any(weight.requires_grad for weight in model.module.parameters())


def test_loading_writes_nothing_and_puts_the_librarys_settings_back(
    saved: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging as library

    folder = saved()
    capfd.readouterr()
    library.set_verbosity(logging.INFO)
    try:
        _load(folder)
        assert library.get_verbosity() == logging.INFO
    finally:
        library.set_verbosity(logging.WARNING)
    assert library.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("dtype", "bf16_is_fast", "expected"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float32),
        ("bf16", False, torch.bfloat16),
        ("bfloat16", False, torch.bfloat16),
        ("fp16", True, torch.float16),
        ("float16", True, torch.float16),
        ("fp32", True, torch.float32),
        ("float32", True, torch.float32),
    ],
)
def test_a_dtype_is_what_is_said_or_what_the_device_computes_fast(
    dtype: str, bf16_is_fast: bool, expected: torch.dtype
) -> None:
    assert parse_dtype(dtype, bf16_is_fast) == expected
    model = _load("random:tiny-llama", dtype=dtype, bf16_is_fast=bf16_is_fast)
    assert model.dtype == expected
    assert {weight.dtype for weight in model.module.parameters()} == {expected}


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="dtype 'int8' is not known; take auto, bf16"):
        _load("random:tiny-llama", dtype="int8")


@pytest.mark.parametrize("device", ["gpu0", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(ModelError, match=f"device '{device}' is not"):
        _load("random:tiny-llama", device=device)


def test_a_name_that_is_nowhere_lists_what_was_tried() -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder") as caught:
        _load("owner/no-such-model")
    assert len(caught.value.tried) == 2


def test_an_unreachable_hub_fails_in_seconds() -> None:
    """In a process of its own: the hub's address is read when its library is imported."""
    code = (
        "import time; from graphseed.models.load import load_model\n"
        "from graphseed.models.errors import ModelNotFound\n"
        "started = time.monotonic()\n"
        "try: load_model('owner/name', device='cpu', bf16_is_fast=False, offline=False)\n"
        "except ModelNotFound as error: print(error)\n"
        "assert time.monotonic() - started < 15\n"
    )
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the Hugging Face hub, owner/name: ConnectError" in done.stdout


def test_a_folder_without_some_weights_is_refused(saved: Callable[..., Path]) -> None:
    folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(ModelError, match=r"lacks 9 weights .*model\.layers\.4"):
        _load(folder)


def test_weights_of_another_shape_than_the_configs_are_refused(saved: Callable[..., Path]) -> None:
    folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(ModelError, match=r"another shape: model.*mlp.down_proj.weight \[64, 128\]"):
        _load(folder)


def test_a_folder_without_any_weights_is_refused(saved: Callable[..., Path]) -> None:
    folder = saved()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        _load(folder)


def test_a_file_of_weights_that_is_cut_short_is_refused(saved: Callable[..., Path]) -> None:
    folder = saved()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be read"):
        _load(folder)


def test_a_folder_without_a_tokenizer_is_refused(saved: Callable[..., Path]) -> None:
    folder = saved()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="needs a tokenizer.json"):
        _load(folder)


def test_a_kind_of_model_that_transformers_does_not_know_is_unsupported(
    saved: Callable[..., Path],
) -> None:
    folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "not-yet-invented"}))
    with pytest.raises(ModelError, match="not-yet-invented"):
        _load(folder)


def test_an_encoder_decoder_is_unsupported(saved: Callable[..., Path]) -> None:
    folder = saved()
    T5Config(vocab_size=300, d_model=64, num_layers=2, num_heads=4).save_pretrained(folder)
    with pytest.raises(ModelUnsupported, match="does not load it as a causal model"):
        _load(folder)


def test_a_model_that_would_run_wrongly_is_refused_by_its_name(
    saved: Callable[..., Path],
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    with pytest.raises(ModelUnsupported, match=rf"{folder} cannot run: .*on the host"):
        _load(folder)


def test_weights_that_do_not_fit_say_how_much_they_need(
    monkeypatch: pytest.MonkeyPatch, saved: Callable[..., Path]
) -> None:
    load_weights = folder_module._load_weights

    class TooLarge:
        def __init__(self, module: Any) -> None:
            self.parameters = module.parameters

        def to(self, device: torch.device) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(folder_module, "_load_weights", lambda *args: TooLarge(load_weights(*args)))
    with pytest.raises(ModelError, match="919,808 bytes"):
        _load(saved(), dtype="fp32")


def test_the_name_is_public_and_importing_the_package_imports_no_torch() -> None:
    assert graphseed.load_model is load_model
    code = (
        "import sys, graphseed, graphseed.models, graphseed.models.errors, graphseed.models.resolve"
        "; sys.exit('torch' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france() -> None:
    model = load_model("smollm2", device="cpu", dtype="bf16", bf16_is_fast=True)
    assert model.eos_ids == {2}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = model.chat(question)
    num_prompt = len(ids)
    with torch.no_grad(), attention_context(CausalAttention()):
        while ids[-1] not in model.eos_ids or len(ids) == num_prompt:
            row = torch.tensor([len(ids) - 1], dtype=torch.int32)
            positions = torch.arange(len(ids), dtype=torch.int32)
            logits = model.forward(torch.tensor(ids, dtype=torch.int32), positions, row)
            ids.append(int(logits[0].argmax()))
            assert len(ids) < num_prompt + 32
    assert model.decode(ids[num_prompt:]) == "The capital of France is Paris."
