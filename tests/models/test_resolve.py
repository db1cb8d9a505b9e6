"""Which sources a name may mean, and in which order."""

from pathlib import Path

import pytest

from graphseed.models.resolve import (
    GgufFile,
    HubRepo,
    LocalFolder,
    Nowhere,
    RandomPreset,
    SmolLM2Folder,
    SmolLM2Wheel,
    sources_of,
)


def test_random_names_a_preset_and_nothing_else() -> None:
    assert sources_of("random:qwen3-0.6b") == (RandomPreset("qwen3-0.6b"),)


def test_smollm2_is_the_folder_made_earlier_then_the_hub_then_the_wheel() -> None:
    repo = HubRepo("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert sources_of("smollm2") == (SmolLM2Folder(), repo, SmolLM2Wheel())


def test_a_folder_with_a_config_is_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert sources_of(str(tmp_path)) == (LocalFolder(tmp_path),)


@pytest.mark.parametrize("file_name", ["model.gguf", "model.bin"])
def test_a_gguf_file_is_known_by_its_name_or_its_first_bytes(
    tmp_path: Path, file_name: str
) -> None:
    file = tmp_path / file_name
    file.write_bytes(b"GGUF\3\0\0\0")
    assert sources_of(str(file)) == (GgufFile(file),)


def test_a_file_of_another_kind_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    file.write_bytes(b"PK\3\4")
    (only,) = sources_of(str(file))
    assert isinstance(only, Nowhere)
    assert "neither a GGUF file nor a folder" in only.reason


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    (only,) = sources_of(str(tmp_path))
    assert isinstance(only, Nowhere)
    assert "small.gguf" in only.reason


@pytest.mark.parametrize("name", ["/no/such", "./no-such", "~/no-such-model", "no-such.gguf"])
def test_what_is_plainly_a_path_is_not_asked_of_the_hub(name: str) -> None:
    (only,) = sources_of(name)
    assert isinstance(only, Nowhere)
    assert "no such file or folder" in only.reason


@pytest.mark.parametrize("name", ["owner/name", "gpt2", "Qwen/Qwen3-0.6B"])
def test_another_name_is_looked_for_here_and_then_on_the_hub(name: str) -> None:
    here, hub = sources_of(name)
    assert isinstance(here, Nowhere)
    assert hub == HubRepo(name)


@pytest.mark.parametrize("name", ["", "a/b/c", "what is this"])
def test_a_name_of_no_form_has_no_source_that_could_have_it(name: str) -> None:
    assert all(isinstance(source, Nowhere) for source in sources_of(name))
