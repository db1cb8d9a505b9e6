"""Which models are rerankers, which are taken, and which classifiers are refused, and why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphseed.models.errors import ModelError, ModelUnsupported
from graphseed.models.heads import ModelKind, kind_of
from graphseed.models.load import load_model, random_model
from graphseed.models.model import Model
from graphseed.models.presets import preset_config

RERANKER = "random:tiny-qwen3-reranker"
FAMILIES = {
    "tiny-llama": "LlamaForSequenceClassification",
    "tiny-qwen3": "Qwen3ForSequenceClassification",
    "tiny-gemma3": "Gemma3TextForSequenceClassification",
    "tiny-qwen3-moe": "Qwen3MoeForSequenceClassification",
}


def _load(name: str | Path, **more: Any) -> Model:
    how = {"device": "cpu", "dtype": "fp32", "bf16_is_fast": False, "offline": True, **more}
    return load_model(str(name), progress=False, **how)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a tiny reranker as a Hugging Face folder; `said` goes over its config.json."""

    def save(preset: str = "tiny-qwen3", **said: Any) -> Path:
        config = preset_config(preset, architectures=[FAMILIES[preset]], num_labels=1)
        model = random_model(config, device="cpu", seed=3)
        model.module.save_pretrained(tmp_path)
        model.tokenizer.save_pretrained(tmp_path)
        told = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(told | said))
        return tmp_path

    return save


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["Qwen3ForSequenceClassification"], ModelKind.RERANKER),
        (["LlamaForCausalLM"], ModelKind.CAUSAL),
        ([], ModelKind.CAUSAL),
        (None, ModelKind.CAUSAL),
    ],
)
def test_the_architecture_of_a_config_tells_the_kind(
    names: list[str] | None, kind: ModelKind
) -> None:
    assert kind_of(names) is kind


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_folder_of_a_reranker_gives_the_weights_that_were_saved_with_the_head(
    saved: Callable[..., Path], preset: str
) -> None:
    model = _load(saved(preset), takes_rerankers=True)
    assert model.kind is ModelKind.RERANKER and not model.can_generate
    config = preset_config(preset, architectures=[FAMILIES[preset]], num_labels=1)
    same = random_model(config, device="cpu", seed=3)
    weights = dict(model.module.named_parameters())
    assert weights["score.weight"].shape == (1, 64)
    for name, want in same.module.named_parameters():
        assert torch.equal(weights[name], want), name
    assert model.layers == same.layers and len(model.layers) == 4
    assert model.eos_ids == {257}


def test_a_reranker_is_refused_by_its_name_before_its_weights_are_read(
    saved: Callable[..., Path],
) -> None:
    folder = saved()
    (folder / "model.safetensors").unlink()
    for name in (str(folder), RERANKER):
        with pytest.raises(ModelError, match=f"{name} is a reranker: .*generates no text"):
            _load(name)


def test_a_head_of_several_labels_is_refused(saved: Callable[..., Path]) -> None:
    folder = saved(id2label={"0": "no", "1": "yes"})
    with pytest.raises(ModelUnsupported, match="with 2 labels; graphseed reranks with a head of"):
        _load(folder, takes_rerankers=True)


def test_a_class_that_transformers_does_not_have_is_not_taken_for_the_one_that_it_has(
    saved: Callable[..., Path],
) -> None:
    folder = saved("tiny-llama", architectures=["LlamaBidirectionalForSequenceClassification"])
    with pytest.raises(ModelUnsupported, match="transformers has LlamaForSequenceClassification"):
        _load(folder, takes_rerankers=True)


def test_an_encoder_with_a_head_is_refused(saved: Callable[..., Path]) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    folder = saved()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=300, intermediate_size=32, num_labels=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    with pytest.raises(ModelUnsupported, match="Bert.* is not a causal decoder whose head reads"):
        _load(folder, takes_rerankers=True)


def test_a_decoder_that_attends_to_what_comes_after_is_refused(
    saved: Callable[..., Path],
) -> None:
    folder = saved("tiny-gemma3", use_bidirectional_attention=True)
    with pytest.raises(ModelUnsupported, match="not causal"):
        _load(folder, takes_rerankers=True)


def test_a_causal_checkpoint_that_calls_itself_a_reranker_lacks_the_head(tmp_path: Path) -> None:
    model = random_model(preset_config("tiny-qwen3"), device="cpu")
    model.module.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    told |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "score"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match=r"lacks 1 weights .*score\.weight"):
        _load(tmp_path, takes_rerankers=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scores_are_the_heads_in_float64_whatever_the_dtype(dtype: str) -> None:
    model = _load(RERANKER, dtype=dtype, takes_rerankers=True)
    hidden = torch.randn(3, model.hidden_size, generator=torch.Generator().manual_seed(1))
    scores = model.scores(hidden)
    assert scores.dtype == torch.float64 and scores.shape == (3,)
    want = hidden.double() @ model.module.score.weight[0].double()
    torch.testing.assert_close(scores, want, rtol=1e-12, atol=1e-12)  # another order of the sum
