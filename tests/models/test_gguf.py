"""A GGUF file into a folder: the same weights and tokens, once, or a clear refusal."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from graphseed.models import gguf as gguf_module
from graphseed.models.byte_tokenizer import _byte_letters
from graphseed.models.cache import is_whole, read_record
from graphseed.models.errors import ModelUnsupported
from graphseed.models.gguf import check_can_read_gguf
from graphseed.models.load import load_model
from graphseed.models.wheel import sha256_of

_HIDDEN, _HEADS, _KV_HEADS, _INTER, _LAYERS = 64, 4, 2, 128, 2
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}>"


def _weights() -> dict[str, np.ndarray[Any, Any]]:
    """By the names GGUF gives them. Seven bits each, so that bf16 holds them exactly."""
    draw = np.random.default_rng(0)
    kv = _HIDDEN // _HEADS * _KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (260, _HIDDEN)}
    for i in range(_LAYERS):
        shapes |= {
            f"blk.{i}.attn_q": (_HIDDEN, _HIDDEN),
            f"blk.{i}.attn_k": (kv, _HIDDEN),
            f"blk.{i}.attn_v": (kv, _HIDDEN),
            f"blk.{i}.attn_output": (_HIDDEN, _HIDDEN),
            f"blk.{i}.ffn_gate": (_INTER, _HIDDEN),
            f"blk.{i}.ffn_up": (_INTER, _HIDDEN),
            f"blk.{i}.ffn_down": (_HIDDEN, _INTER),
            f"blk.{i}.attn_norm": (_HIDDEN,),
            f"blk.{i}.ffn_norm": (_HIDDEN,),
        }
    shapes["output_norm"] = (_HIDDEN,)
    return {
        f"{name}.weight": (draw.integers(-127, 128, shape) / 1024).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers", minversion="5.23")
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INTER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*_byte_letters(), "th", "<|bos|>", "<|eos|>", "<|unk|>"])
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_unk_token_id(259)
    writer.add_chat_template(_TEMPLATE)
    for name, weight in _weights().items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _load(file: Path, cache_dir: Path) -> Any:
    return load_model(str(file), device="cpu", bf16_is_fast=True, cache_dir=cache_dir, offline=True)


def test_a_file_is_converted_with_its_weights_tokens_and_template(
    gguf_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = _load(gguf_file, tmp_path / "cache")
    assert capfd.readouterr() == ("", "")
    folder = Path(model.source)
    assert is_whole(folder)
    assert read_record(folder)["source"] == {
        "file": "tiny.gguf",
        "bytes": gguf_file.stat().st_size,
        "sha256": sha256_of(gguf_file),
    }
    stored = load_file(folder / "model.safetensors")
    wanted = _weights()
    assert len(stored) == len(wanted)
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    for name, gguf_name in plain.items():
        assert stored[name].dtype == torch.bfloat16
        assert torch.equal(stored[name].float(), torch.from_numpy(wanted[gguf_name])), name
    assert model.encode("the") == [256, ord("e")]
    assert model.decode(model.encode("the héllo")) == "the héllo"
    assert model.decode(model.chat([{"role": "user", "content": "hi"}])) == "hi>"
    assert model.eos_ids == {258}
    assert (model.context_len, len(model.layers)) == (512, _LAYERS)


def test_a_second_start_does_not_convert_again(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _load(gguf_file, tmp_path / "cache")
    monkeypatch.setattr(gguf_module, "_read_weights", lambda file: pytest.fail("converted again"))
    monkeypatch.setattr(gguf_module, "check_can_read_gguf", lambda: pytest.fail("checked again"))
    second = _load(gguf_file, tmp_path / "cache")
    assert second.source == first.source
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_interrupted_conversion_leaves_no_folder(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(read: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_module, "_plain", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _load(gguf_file, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_no_model_is_unsupported(gguf_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelUnsupported, match="cannot read .*broken.gguf"):
        _load(broken, tmp_path / "cache")


@pytest.mark.parametrize("version", ["5.17.0", "5.22.9", "4.57.1"])
def test_old_transformers_are_refused_with_the_reason(version: str) -> None:
    with pytest.raises(ModelUnsupported, match=rf">= 5.23 and {version} .*wrongly and in silence"):
        check_can_read_gguf(version)


def test_the_installed_version_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    with pytest.raises(ModelUnsupported, match="5.17.0 is installed"):
        check_can_read_gguf()


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    import importlib.util

    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    advice = rf"needs {missing}: run `pip install 'graphseed\[gguf\]'`"
    with pytest.raises(ModelUnsupported, match=advice):
        check_can_read_gguf("5.23.0")
