"""Fetches llama.cpp's server tests, makes them a model and a program, and runs the named ones.

Everything is kept in the cache folder; the tests' files are left as they are. What is fetched is
the source distribution of llama-cpp-python, which has llama.cpp in it, pinned by its checksum.
"""

import hashlib
import os
import shlex
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from gguf_model import write_model

from graphseed.models import load_model
from graphseed.models.cache import default_cache_dir

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
INSIDE = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
WANTED = ("tools/server/tests/", "models/templates/", "models/ggml-vocab-llama-spm.gguf")
PACKAGES = (
    "aiohttp", "filelock", "numpy", "openai", "prometheus-client", "pytest>=8,<9",
    "pytest-timeout", "pytest-xdist", "requests", "wget",
)  # fmt: skip
TEST_SECONDS = 180
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = ROOT / "tests/server/peer_names.txt"

# Leaves out llama-server's flags that name a model: all have one value but --offline.
PROGRAM = """#!/usr/bin/env bash
args=()
while [ $# -gt 0 ]; do
    case "$1" in
        --hf-repo | --hf-file | --model-url | --model) shift ;;
        --offline) ;;
        *) args+=("$1") ;;
    esac
    shift
done
export PYTHONPATH=@src@
exec @server@ "${args[@]}" --model @model@
"""


def main() -> int:
    folder = default_cache_dir() / f"peer-suite-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    vendor = _unpacked(folder)
    model = folder / "random-llama.gguf"
    if not model.exists():
        print("making a model with random weights", flush=True)
        write_model(vendor / "models/ggml-vocab-llama-spm.gguf", model)
    load_model(str(model), device="cpu", dtype="fp32", bf16_is_fast=False)  # converts it, once
    program = folder / "llama-server"
    program.write_text(_program(model), encoding="utf-8")
    program.chmod(0o755)
    environ = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(program),
        "PEER_NAMES": str(NAMES),
        "PORT": str(_free_port()),
        "PYTHONPATH": str(HERE),
    }
    command = [
        str(_python_of_the_suite(folder)), "-m", "pytest", "-q", "-p", "peer_plugin",
        f"--timeout={TEST_SECONDS}", "-p", "no:cacheprovider", "--tb=line", *sys.argv[1:],
    ]  # fmt: skip
    return subprocess.run(command, cwd=vendor / "tools/server/tests", env=environ).returncode


def _unpacked(folder: Path) -> Path:
    """The folder of llama.cpp, with the parts that are needed."""
    vendor = folder / INSIDE
    if (vendor / "tools/server/tests/conftest.py").exists():
        return vendor
    archive = folder / f"llama_cpp_python-{VERSION}.tar.gz"
    if not archive.exists():
        print(f"fetching {archive.name}", flush=True)
        subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
                "llama-cpp-python", "--dest", str(folder), f"llama-cpp-python=={VERSION}",
            ],
            check=True,
        )  # fmt: skip
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{archive} has the SHA-256 {digest}; expected {SHA256}: delete it")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, _parts(tar), filter="data")
    return vendor


def _parts(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if member.isfile() and member.name.removeprefix(INSIDE).startswith(WANTED):
            yield member


def _python_of_the_suite(folder: Path) -> Path:
    """An environment with what the tests import, and nothing of ours."""
    python, stamp = folder / "venv/bin/python", folder / "venv/packages"
    wanted = " ".join(PACKAGES)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        print("making the tests' environment", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PACKAGES], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def _program(model: Path) -> str:
    ours = f"{shlex.quote(sys.executable)} -m graphseed.cli.main serve"
    filled = {
        "src": shlex.quote(str(ROOT / "src")),
        "server": os.environ.get("PEER_SERVER", ours),  # llama-server itself, for comparison
        "model": shlex.quote(str(model)),
    }
    program = PROGRAM
    for name, value in filled.items():
        program = program.replace(f"@{name}@", value)
    return program


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
