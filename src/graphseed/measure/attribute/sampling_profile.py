"""Samples a running graphseed process: the share of its CPU time that goes into submission.

Owns the call of py-spy, the reading of its stacks and what the process says of its policy. A stack
counts where its innermost frame of ours puts it: submission is everything inside StepRunner.run,
and captures wherever they happen, without waiting for the device. Prompt and decode steps share
these frames and are not told apart. Reads /proc, so Linux alone can name the policy.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from graphseed.capture.errors import GraphseedError, SelectorError
from graphseed.capture.selector import FLAG, read_selectors

RATE: Final = 200  # samples a second: each pauses the process for under a millisecond
SEVERAL: Final = ("demo", "bench", "verify", "attribute")  # commands that run several policies
_FRAME: Final = re.compile(r"(?P<name>.*) \((?P<file>.*?)(:\d+)?\)")
_THREAD: Final = "thread "


class CannotSample(GraphseedError, RuntimeError):
    """A process could not be sampled."""


class Place(Enum):
    """Where a sample was taken."""

    STAGING = "staging"
    DIRECT = "direct path"
    CAPTURE = "capture and instantiate"
    LAUNCH = "launch"
    CACHE = "cache and bookkeeping"  # in a step, and none of the above
    WAITING = "waiting for the device"
    SAMPLING = "sampling"  # and its wait for the logits
    ENGINE = "rest of the engine's thread"
    OTHER = "other threads"
    OUTSIDE = "outside Python"  # no frame at all: the process starts or ends


SUBMISSION: Final = (Place.STAGING, Place.DIRECT, Place.CAPTURE, Place.LAUNCH, Place.CACHE)
# Outermost first in a stack; the last that matches says where the sample is.
_FRAMES: Final[Mapping[tuple[str, str], Place]] = {
    ("EngineCore.step", "graphseed/engine/core.py"): Place.ENGINE,
    ("EngineCore._sample", "graphseed/engine/core.py"): Place.SAMPLING,
    ("StepRunner.run", "graphseed/engine/step.py"): Place.CACHE,
    ("StepRunner._build.<locals>.work", "graphseed/engine/step.py"): Place.DIRECT,
    ("Staging.stage", "graphseed/engine/staging.py"): Place.STAGING,
    ("Space.seed", "graphseed/capture/space.py"): Place.CAPTURE,
    ("Space.launch", "graphseed/capture/space.py"): Place.LAUNCH,
    ("CudaMark.wait", "graphseed/drivers/cuda.py"): Place.WAITING,
    ("CudaDriver.synchronize", "graphseed/drivers/cuda.py"): Place.WAITING,
}
# Only the outermost of these counts: what they call may look like another place.
_FINAL: Final = frozenset({Place.CAPTURE, Place.LAUNCH, Place.WAITING})

_ELSEWHERE: Final = frozenset({Place.OTHER, Place.OUTSIDE})


@dataclass(frozen=True, slots=True)
class SampledProcess:
    """One process, sampled while it ran."""

    pid: int
    policy: str  # in words
    samples: Mapping[Place, int]  # of threads that were running

    @property
    def num_samples(self) -> int:
        """Samples of running threads."""
        return sum(self.samples.values())

    @property
    def submission_share(self) -> float:
        """Share of the samples inside submission, 0 to 1."""
        return sum(self.samples.get(place, 0) for place in SUBMISSION) / self.num_samples

    def share(self, place: Place) -> float:
        """Share of the samples at one place, 0 to 1."""
        return self.samples.get(place, 0) / self.num_samples


def sample_processes(pids: Sequence[int], seconds: int) -> list[SampledProcess]:
    """Sample running graphseed processes, all at the same time. Raises CannotSample."""
    program = _program()
    policies = [policy_of(pid) for pid in pids]  # they may be gone afterwards
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{pid}.raw" for pid in pids]
        running = [
            subprocess.Popen(
                [
                    program, "record", "--pid", str(pid), "--duration", str(seconds),
                    "--rate", str(RATE), "--format", "raw", "--threads", "--output", str(file),
                ],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True,
            )
            for pid, file in zip(pids, files, strict=True)
        ]  # fmt: skip
        said = [process.communicate()[1] for process in running]
        return [
            SampledProcess(pid, policy, _samples(pid, file, error))
            for pid, policy, file, error in zip(pids, policies, files, said, strict=True)
        ]


def places(raw: str) -> Counter[Place]:
    """Count py-spy's raw stacks ("frame;frame;... count", outermost first) by place.

    A thread is the engine's when any of its stacks is inside a step.
    """
    by_thread: dict[str, Counter[Place]] = defaultdict(Counter)
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        if not count.isdigit():
            continue
        frames = stack.split(";")
        thread = next((frame for frame in frames if frame.startswith(_THREAD)), "")
        by_thread[thread][_place(frames)] += int(count)
    total: Counter[Place] = Counter()
    for counts in by_thread.values():
        is_engine = bool(set(counts) - _ELSEWHERE)
        for place, num in counts.items():
            total[Place.ENGINE if is_engine and place is Place.OTHER else place] += num
    return total


def policy_of(pid: int) -> str:
    """What selected the policy of a running process, in words. Raises CannotSample."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        raise CannotSample(
            f"no process has id {pid}; expected the id of a running graphseed process"
        ) from None
    except PermissionError:
        pass  # it is somebody else's; py-spy says whether it may be looked at
    try:
        argv = _words(Path(f"/proc/{pid}/cmdline").read_bytes())
        pairs = (word.partition("=") for word in _words(Path(f"/proc/{pid}/environ").read_bytes()))
        environ = {name: value for name, _, value in pairs}
    except OSError as error:
        return f"unknown ({error.strerror})"
    if any(command in argv for command in SEVERAL):
        return "several in turn"
    try:
        return read_selectors(environ, _flag(argv)).prompt.value
    except SelectorError as error:
        return f"unknown ({error})"


def _place(frames: Sequence[str]) -> Place:
    matches = [match for match in map(_FRAME.fullmatch, frames) if match is not None]
    own = [match for match in matches if not match[0].startswith(_THREAD)]
    place = Place.OTHER if own else Place.OUTSIDE
    for match in own:
        found = _FRAMES.get((match["name"], match["file"]))
        if found is not None:
            place = found
        if place in _FINAL:
            return place
    return place


def _samples(pid: int, file: Path, error: str) -> Counter[Place]:
    raw = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not raw:
        raise CannotSample(_why(pid, error))
    counts = places(raw)
    if not set(counts) - _ELSEWHERE:
        raise CannotSample(
            f"process {pid} ran Python and no step of a graphseed engine while it was sampled; "
            "sample a graphseed process while it answers prompts"
        )
    return counts


def _why(pid: int, error: str) -> str:
    lowered = error.lower()
    if "permission denied" in lowered or "not permitted" in lowered:
        return (
            f"process {pid} may not be sampled: ptrace is not permitted here; run as its owner or "
            "root, set /proc/sys/kernel/yama/ptrace_scope to 0, or start a container with "
            "--cap-add SYS_PTRACE"
        )
    if "python version" in lowered:
        return f"process {pid} is no Python process; expected a running graphseed process"
    lines = [line for line in error.splitlines() if "error" in line.lower()]
    told = lines[0].strip() if lines else "nothing in it ran while it was sampled"
    return f"process {pid} could not be sampled: {told}"


def _program() -> str:
    """Path of py-spy: beside this Python, else on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found is None:
        raise CannotSample(
            "py-spy, which samples a running process, is not installed; install it with "
            "pip install 'graphseed[attribute]'"
        )
    return found


def _flag(argv: Sequence[str]) -> str | None:
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        if word == FLAG:
            return following
        if word.startswith(f"{FLAG}="):
            return word.partition("=")[2]
    return None


def _words(raw: bytes) -> list[str]:
    return [word.decode(errors="replace") for word in raw.split(b"\0") if word]
