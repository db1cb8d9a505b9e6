"""The cache folder: whole or not there."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from graphseed.models.cache import build_folder, default_cache_dir, is_whole, read_record


def _fill(building: Path) -> Mapping[str, object]:
    (building / "weights").write_bytes(b"w")
    return {"source": "somewhere"}


def test_a_built_folder_is_whole_and_says_where_it_came_from(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "models" / "one", _fill)
    assert is_whole(folder)
    assert (folder / "weights").read_bytes() == b"w"
    assert read_record(folder) == {"source": "somewhere"}
    assert [path.name for path in folder.parent.iterdir()] == ["one"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, interruption: type[BaseException]
) -> None:
    def cut_short(building: Path) -> Mapping[str, object]:
        _fill(building)
        raise interruption

    with pytest.raises(interruption):
        build_folder(tmp_path / "one", cut_short)
    assert list(tmp_path.iterdir()) == []


def test_of_two_builds_of_one_folder_the_first_to_finish_stays(tmp_path: Path) -> None:
    folder = tmp_path / "one"

    def overtaken(building: Path) -> Mapping[str, object]:
        build_folder(folder, _fill)
        (building / "weights").write_bytes(b"late")
        return {"source": "the late one"}

    assert build_folder(folder, overtaken) == folder
    assert read_record(folder) == {"source": "somewhere"}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_half_made_folder_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "half").write_bytes(b"h")
    build_folder(folder, _fill)
    assert not (folder / "half").exists()
    assert is_whole(folder)


def test_what_a_killed_build_left_is_swept_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / ".building-old", tmp_path / ".building-young"
    old.mkdir()
    young.mkdir()
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    build_folder(tmp_path / "one", _fill)
    assert not old.exists()
    assert young.exists()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSEED_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert default_cache_dir() == Path("/own")
    monkeypatch.delenv("GRAPHSEED_CACHE")
    assert default_cache_dir() == Path("/shared/graphseed")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/graphseed")
