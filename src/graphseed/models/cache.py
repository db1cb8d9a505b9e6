"""The folder in which made-ready models are kept, and how one is put there.

Owns the place, the atomic build of a folder (made under another name, then renamed) and the record
of where its content came from. Does not know what is in a folder, nor how it is made.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

RECORD_NAME: Final = "graphseed.json"  # written last: a folder that has it is whole

_BUILDING_PREFIX: Final = ".building-"
_STALE_S: Final = 24 * 3600.0  # no build takes a day: an older one was killed


def default_cache_dir() -> Path:
    """$GRAPHSEED_CACHE, else $XDG_CACHE_HOME/graphseed, else ~/.cache/graphseed."""
    if own := os.environ.get("GRAPHSEED_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "graphseed"
    return Path.home() / ".cache" / "graphseed"


def is_whole(folder: Path) -> bool:
    """Whether the folder was built to its end."""
    return (folder / RECORD_NAME).is_file()


def read_record(folder: Path) -> Mapping[str, object]:
    """Where the content of a whole folder came from."""
    record: Mapping[str, object] = json.loads((folder / RECORD_NAME).read_text("utf-8"))
    return record


def build_folder(folder: Path, build: Callable[[Path], Mapping[str, object]]) -> Path:
    """Have `build` fill a new folder and put it at `folder` in one step; returns `folder`.

    `build` gets an empty folder beside the target and returns the record to keep with it. When it
    raises (an interrupt too), nothing is left. Of two processes that build the same folder, the
    first to finish puts it there and the other takes that one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=_BUILDING_PREFIX, dir=folder.parent))
    try:
        record = build(building)
        text = json.dumps(dict(record), indent=2) + "\n"
        (building / RECORD_NAME).write_text(text, "utf-8")
        building.chmod(0o755)  # mkdtemp makes it the user's alone
        _put(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _put(building: Path, folder: Path) -> None:
    if folder.exists() and not is_whole(folder):
        shutil.rmtree(folder)  # not ours, or from a build that was cut short: never used
    try:
        os.replace(building, folder)
    except OSError:
        if not is_whole(folder):  # else another process was first, with the same content
            raise


def _sweep(parent: Path) -> None:
    oldest = time.time() - _STALE_S
    for left in parent.glob(f"{_BUILDING_PREFIX}*"):
        if left.stat().st_mtime < oldest:
            shutil.rmtree(left, ignore_errors=True)
