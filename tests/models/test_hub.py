"""The hub as a source: fails fast, falls back to what was fetched, fetches one format."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from graphseed.models import hub
from graphseed.models.errors import ModelError
from graphseed.models.hub import fetch_from_hub


class _Hub:
    """A hub that has one repository's files, or cannot be reached."""

    def __init__(self, files: list[str] | Exception, folder: Path | None) -> None:
        self.files = files
        self.folder = folder
        self.calls: list[tuple[str, Any]] = []

    def ask(self, repo_id: str) -> list[str]:
        self.calls.append(("ask", repo_id))
        if isinstance(self.files, Exception):
            raise self.files
        return self.files

    def snapshot(self, repo_id: str, **options: Any) -> str:
        self.calls.append(("snapshot", options))
        if self.folder is None:
            raise FileNotFoundError("nothing fetched")
        return str(self.folder)


def _use(monkeypatch: pytest.MonkeyPatch, stand_in: _Hub) -> None:
    monkeypatch.setattr(hub, "_ask_for_files", stand_in.ask)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.snapshot)


def test_only_what_a_model_needs_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = [
        "config.json", "tokenizer.json", "README.md", "model.safetensors", "pytorch_model.bin",
        "onnx/model.onnx", "original/consolidated.safetensors", "consolidated.safetensors",
        "chat_template.jinja",
    ]  # fmt: skip
    stand_in = _Hub(there, tmp_path)
    _use(monkeypatch, stand_in)
    assert fetch_from_hub("o/n", offline=False, show_bars=False) == tmp_path
    wanted = ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
    assert stand_in.calls == [("ask", "o/n"), ("snapshot", {"allow_patterns": wanted})]


def test_a_repository_of_gguf_files_is_refused_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _use(monkeypatch, _Hub(["README.md", "q4.gguf"], tmp_path))
    with pytest.raises(ModelError, match="no config.json; fetch one of its GGUF files"):
        fetch_from_hub("o/n", offline=False, show_bars=False)


def test_an_unreachable_hub_gives_the_copy_fetched_earlier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    stand_in = _Hub(ConnectionError("no route"), tmp_path)
    _use(monkeypatch, stand_in)
    assert fetch_from_hub("o/n", offline=False, show_bars=False) == tmp_path
    assert stand_in.calls[-1] == ("snapshot", {"local_files_only": True})


def test_an_unreachable_hub_and_no_copy_is_an_error_with_both_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _use(monkeypatch, _Hub(ConnectionError("no route"), None))
    with pytest.raises(ModelError, match="ConnectionError: no route, and no copy was fetched"):
        fetch_from_hub("o/n", offline=False, show_bars=False)


@pytest.mark.parametrize(("offline", "environment"), [(True, False), (None, True)])
def test_offline_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, offline: bool | None, environment: bool
) -> None:
    stand_in = _Hub(["config.json"], None)
    _use(monkeypatch, stand_in)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", environment)
    with pytest.raises(ModelError, match="offline was asked for"):
        fetch_from_hub("o/n", offline=offline, show_bars=False)
    assert [call for call, _ in stand_in.calls] == ["snapshot"]


def test_the_setting_of_the_hubs_bars_is_put_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    seen = []

    class Watching(_Hub):
        def snapshot(self, repo_id: str, **options: Any) -> str:
            seen.append(are_progress_bars_disabled())
            return super().snapshot(repo_id, **options)

    _use(monkeypatch, Watching(["config.json", "model.safetensors"], tmp_path))
    before = are_progress_bars_disabled()
    fetch_from_hub("o/n", offline=False, show_bars=False)
    assert seen == [True]
    assert are_progress_bars_disabled() == before
