"""Runs the command line in this process, or in one of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from graphseed.cli.main import main

SELECTORS = ("GGML_CUDA_PROMPT_GRAPH_CAPTURE_SEED", "GGML_CUDA_DISABLE_GRAPHS")
TINY = ("-m", "random:tiny-llama", "--device", "cpu", "-ub", "16")


@pytest.fixture(autouse=True)
def no_selectors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SELECTORS:
        monkeypatch.delenv(name, raising=False)


Cli = Callable[..., int]


@pytest.fixture
def cli(caplog: pytest.LogCaptureFixture) -> Cli:
    """`cli("run", ...)` adds a tiny model and returns the exit code; the log is in `caplog`."""

    def call(command: str, *args: str) -> int:
        caplog.set_level("INFO", logger="graphseed")
        return main([command, *TINY, *args])

    return call


def in_own_process(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "graphseed.cli.main", *args],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(root / "src"), **environ},
    )  # fmt: skip
