"""Sources into a Hugging Face folder on this machine: try each, keep why it failed.

Owns the order of attempts, what was tried, and where converted GGUF files are kept. Does not load
weights into memory for use, and does not know random presets (they have no folder).
"""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from graphseed.models import wheel
from graphseed.models.cache import build_folder, is_whole
from graphseed.models.errors import ModelError, ModelNotFound, ModelUnsupported
from graphseed.models.gguf import check_can_read_gguf, convert_gguf
from graphseed.models.hub import fetch_from_hub
from graphseed.models.phases import Phases
from graphseed.models.resolve import (
    GgufFile,
    HubRepo,
    LocalFolder,
    Nowhere,
    RandomPreset,
    SmolLM2Folder,
    SmolLM2Wheel,
    Source,
)

_SMOLLM2_FOLDER: Final = f"smollm2-{wheel.GGUF_SHA256[:12]}"


@dataclass(frozen=True, slots=True)
class Fetching:
    """How to fetch: where to keep what is made, whether the network may be asked."""

    cache_dir: Path
    offline: bool | None  # None: as HF_HUB_OFFLINE says
    phases: Phases


def fetch_folder(name: str, sources: Sequence[Source], how: Fetching) -> Path:
    """Return the folder of the first source that has the model.

    Raises ModelNotFound with every source and its reason, and ModelUnsupported at once when the
    name is a file that is there but cannot be used.
    """
    tried: list[tuple[str, str]] = []
    for source in sources:
        try:
            return _fetch(source, how)
        except ModelUnsupported as error:
            if isinstance(source, GgufFile):
                raise
            tried.append((str(source), str(error)))
        except ModelError as error:
            tried.append((str(source), str(error)))
    raise ModelNotFound(name, tried)


def _fetch(source: Source, how: Fetching) -> Path:
    match source:
        case LocalFolder(path):
            return path
        case GgufFile(path):
            return _converted(path, how)
        case HubRepo(repo_id):
            return fetch_from_hub(repo_id, how.offline, show_bars=how.phases.is_drawn)
        case SmolLM2Folder():
            folder = how.cache_dir / _SMOLLM2_FOLDER
            if not is_whole(folder):
                raise ModelError(f"there is none at {folder}")
            return folder
        case SmolLM2Wheel():
            return _from_wheel(how)
        case Nowhere(_, reason):
            raise ModelError(reason)
        case RandomPreset(preset):
            raise ModelError(f"random weights of {preset!r} have no folder")


def _converted(file: Path, how: Fetching) -> Path:
    """The folder of a GGUF file, made at the first call.

    The file is told by its path, size and time of change: reading all of it at each start, for a
    checksum, would cost more than the start itself.
    """
    real = file.resolve()
    stat = real.stat()
    told_by = f"{real}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
    folder = how.cache_dir / f"{file.stem}-{hashlib.sha256(told_by).hexdigest()[:12]}"
    if is_whole(folder):
        return folder
    return build_folder(folder, lambda building: _convert(real, building, how))


def _convert(file: Path, building: Path, how: Fetching) -> Mapping[str, object]:
    made = convert_gguf(file, building, how.phases)
    source = {"file": file.name, "bytes": file.stat().st_size, "sha256": wheel.sha256_of(file)}
    return {"source": source, **made}


def _from_wheel(how: Fetching) -> Path:
    check_can_read_gguf()  # before 93 MB are downloaded for nothing
    folder = how.cache_dir / _SMOLLM2_FOLDER
    if installed := wheel.installed_gguf():
        return build_folder(folder, lambda building: _convert(installed, building, how))
    if how.offline:
        raise ModelError("offline was asked for, and the package is not installed")
    how.cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=how.cache_dir) as fetched:
        file = wheel.fetch_gguf(Path(fetched), how.phases)
        return build_folder(folder, lambda building: _convert(file, building, how))
