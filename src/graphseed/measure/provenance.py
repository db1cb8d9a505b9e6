"""Where a figure comes from: commit, device, versions, command.

Owns the fields that every committed result carries.
"""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_OUTPUT_FLAGS: Final = frozenset({"--json", "--logs", "--plot", "--trace"})
COMMIT_VARIABLE: Final = "GRAPHSEED_COMMIT"  # for a tree that was copied without its history


def provenance(device: str, description: str, program: str = "graphseed") -> dict[str, object]:
    """Fields that say where, when and with what a figure was measured.

    `program` is what ran: "graphseed", or "python benchmarks/many.py".
    """
    import torch
    import transformers

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": f"{program} {shlex.join(_without_outputs(sys.argv[1:]))}",
        "device": device,
        "device_name": description,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _without_outputs(argv: list[str]) -> list[str]:
    """The arguments but for where something was written, which is no part of the figure."""
    kept: list[str] = []
    is_value = False
    for given in argv:
        flag = given.partition("=")[0]
        if not is_value and flag not in _OUTPUT_FLAGS:
            kept.append(given)
        is_value = flag in _OUTPUT_FLAGS and "=" not in given
    return kept


def _commit() -> str | None:
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return named
    # An installed package may lie in somebody else's repository, whose commit says nothing of us.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=12")


def _git(*arguments: str) -> str | None:
    """What git says of this file's folder; None where it says nothing, or is not there."""
    try:
        out = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None
