"""Where a figure comes from."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

from graphseed.measure import provenance


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The module as it lies in a folder of a repository of its own: (module, its file)."""
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    path = tmp_path / "packages" / "provenance.py"
    path.parent.mkdir()
    shutil.copy(provenance.__file__, path)
    (tmp_path / "other").write_text("another project's")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", "other")
    _git(tmp_path, "commit", "--quiet", "--message", "theirs")
    spec = importlib.util.spec_from_file_location("provenance_elsewhere", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path


def _git(folder, *arguments):
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_of_a_repository_that_the_package_is_no_part_of_is_not_ours(elsewhere):
    module, _ = elsewhere
    assert module._commit() is None


def test_the_commit_is_the_one_that_holds_the_package(elsewhere, monkeypatch):
    module, path = elsewhere
    _git(path.parent, "add", path.name)
    _git(path.parent, "commit", "--quiet", "--message", "ours")
    assert module._commit() == _git(path.parent, "rev-parse", "--short=12", "HEAD")
    path.write_text(path.read_text() + "# changed")
    assert module._commit().endswith("-dirty")
    monkeypatch.setenv(module.COMMIT_VARIABLE, "abc123")
    assert module._commit() == "abc123"


@pytest.mark.parametrize(
    "given",
    [
        ["--json", "out/x.jsonl"],
        ["--json=out/x.jsonl"],
        ["--logs", "out", "--json", "out/x.jsonl"],
        ["--plot=out/x.svg", "--trace", "out/x.json"],
    ],
)
def test_where_a_result_is_written_is_no_part_of_its_command(monkeypatch, given):
    monkeypatch.setattr(sys, "argv", ["graphseed", "bench", *given, "-m", "some model"])
    command = provenance.provenance("cpu", "some CPU")["command"]
    assert command == "graphseed bench -m 'some model'"
