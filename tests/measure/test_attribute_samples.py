"""Samples of a running process: which place a stack counts for, and which policy is named."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphseed.measure.attribute import sampling_profile
from graphseed.measure.attribute.sampling_profile import (
    CannotSample,
    Place,
    SampledProcess,
    places,
    policy_of,
    sample_processes,
)

STEP = "thread (1): MainThread;EngineCore.step (graphseed/engine/core.py:145)"
RUN = f"{STEP};StepRunner.run (graphseed/engine/step.py:90)"
WORK = "StepRunner._build.<locals>.work (graphseed/engine/step.py:129);forward (torch/nn.py:1)"
SEED = "Space.seed (graphseed/capture/space.py:65);CudaArena.capture (graphseed/drivers/cuda.py:9)"


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        (f"{RUN};Staging.stage (graphseed/engine/staging.py:68)", Place.STAGING),
        (
            f"{RUN};Staging.stage (graphseed/engine/staging.py:68);"
            "CudaMark.wait (graphseed/drivers/cuda.py:60);_or_lost (graphseed/drivers/cuda.py:390)",
            Place.WAITING,
        ),
        (f"{RUN};GraphCache.run (graphseed/capture/cache.py:68);{WORK}", Place.DIRECT),
        (f"{RUN};{SEED};{WORK}", Place.CAPTURE),  # the work of a capture is no direct run
        (f"{STEP};Settler.after_step (graphseed/engine/settling.py:39);{SEED};{WORK}",
         Place.CAPTURE),
        (f"{RUN};Space.launch (graphseed/capture/space.py:111);x (graphseed/drivers/cuda.py:1)",
         Place.LAUNCH),
        (f"{RUN};GraphCache.run (graphseed/capture/cache.py:68)", Place.CACHE),
        (f"{STEP};EngineCore._sample (graphseed/engine/core.py:300)", Place.SAMPLING),
        (f"{STEP};Scheduler.next (graphseed/engine/scheduler.py:161)", Place.ENGINE),
        ("thread (2): http;handle (uvicorn/server.py:3)", Place.OTHER),
        ("thread (2): http;StepRunner.run (other/engine/step.py:90)", Place.OTHER),  # not ours
        ("thread (1): MainThread", Place.OUTSIDE),
    ],
)  # fmt: skip
def test_a_stack_counts_where_its_innermost_frame_of_ours_is(stack: str, place: Place) -> None:
    assert places(f"{stack} 7\n") == {place: 7}


def test_what_the_engines_thread_does_outside_steps_is_told_from_other_threads() -> None:
    found = places(
        f"{RUN} 6\nthread (1): MainThread;load (graphseed/models/load.py:5) 3\n"
        "thread (1): MainThread 2\nthread (2): http;handle (uvicorn/server.py:3) 4\nnot a stack\n"
    )
    assert found == {Place.CACHE: 6, Place.ENGINE: 3, Place.OUTSIDE: 2, Place.OTHER: 4}


def test_waiting_for_the_device_is_no_submission() -> None:
    process = SampledProcess(1, "off", {Place.DIRECT: 6, Place.STAGING: 1, Place.WAITING: 3})
    assert process.submission_share == 0.7 and process.share(Place.WAITING) == 0.3


def sleeping(*argv: str, **environ: str) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GGML_")}
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv], env=env | environ,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"1\n"
    return process


@pytest.mark.parametrize(
    ("argv", "environ", "policy"),
    [
        (("run",), {}, "off"),
        (("run", "--prompt-graphs", "resident"), {}, "resident"),
        (("run", "--prompt-graphs=seed"), {}, "seed"),
        (("run",), {"GGML_CUDA_PROMPT_GRAPH_CAPTURE_SEED": "1"}, "seed"),
        (("run", "--prompt-graphs", "seed"), {"GGML_CUDA_DISABLE_GRAPHS": ""}, "off"),
        (("demo",), {}, "several in turn"),
        (("run", "--prompt-graphs"), {}, "off"),
        (("run", "--prompt-graphs", "often"), {}, "unknown (--prompt-graphs 'often' means nothing"),
    ],
)  # fmt: skip
def test_the_policy_of_a_process_is_read_from_its_selectors(argv, environ, policy) -> None:
    process = sleeping(*argv, **environ)
    try:
        assert policy_of(process.pid).startswith(policy)
    finally:
        process.communicate()


def test_a_process_that_is_not_there_is_named() -> None:
    process = sleeping()
    process.communicate()
    with pytest.raises(CannotSample, match=f"no process has id {process.pid}; expected the id of"):
        sample_processes([process.pid], 1)


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[bytes]]:
    process = sleeping()
    yield process
    process.communicate()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'Error: Permission Denied: try sudo' >&2; exit 1", "ptrace is not permitted here"),
        ("echo 'Error: Operation not permitted (os error 1)' >&2; exit 1", "ptrace_scope to 0"),
        ("echo 'Error: Failed to find python version from target process' >&2; exit 1",
         "is no Python process"),
        ("echo 'Error: Something new' >&2; exit 1", "could not be sampled: Error: Something new"),
        ('while [ "$1" != --output ]; do shift; done; echo "thread (1): x;f (a.py:1) 9" > "$2"',
         "no step of a graphseed engine"),
        ('while [ "$1" != --output ]; do shift; done; : > "$2"', "nothing in it ran"),
    ],
)  # fmt: skip
def test_what_keeps_a_process_from_being_sampled_is_said(
    body: str, words: str, idle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sampling_profile, "_program", lambda: str(program))
    with pytest.raises(CannotSample, match=f"process {idle.pid} .*{words}"):
        sample_processes([idle.pid], 1)


def test_a_missing_py_spy_says_which_extra_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotSample, match=r"pip install 'graphseed\[attribute\]'"):
        sample_processes([os.getpid()], 1)
