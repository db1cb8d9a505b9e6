"""`graphseed attribute`: its tables, its records, its errors, and samples of a real run."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graphseed.capture.errors import Reason
from graphseed.cli.main import main
from graphseed.drivers import host

TINY = ("attribute", "-m", "random:tiny-llama", "--device", "cpu", "--dtype", "fp32")
HAS_PY_SPY = Path(sys.executable).with_name("py-spy").is_file() or shutil.which("py-spy")


def test_it_predicts_then_measures_and_says_what_is_worth_it(capsys, tmp_path) -> None:
    result, trace = tmp_path / "out" / "attribute.jsonl", tmp_path / "trace.json"
    arguments = ("--chunks", "16,40", "--contexts", "0,24", "--json", str(result))
    assert main([*TINY, *arguments, "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    order = [
        out.index(text)
        for text in ("direct path", "under the profiler, which inflates it", "launch gap",
                     "predicted before any graph", "predicted and measured", "note: on a CPU",
                     "verdict:")
    ]  # fmt: skip
    assert order == sorted(order)
    assert "time inside kernels" in out and "not replayed" not in out
    [record] = [json.loads(line) for line in result.read_text().splitlines()]
    assert (record["benchmark"], record["dtype"]) == ("attribute", "float32")
    assert record["device"] == "cpu" and record["verdict"]
    assert record["gap_us"] == record["node_us"] - record["kernel_us"]
    assert [(c["context"], c["chunk"]) for c in record["cells"]] == [
        (0, 16), (0, 40), (24, 16), (24, 40),
    ]  # fmt: skip
    for cell in record["cells"]:
        assert sum(cell["host_split"].values()) == pytest.approx(1)
        assert cell["multiple"] == cell["direct_beside_ms"] / cell["replay_ms"]
        assert cell["error"] == pytest.approx(cell["predicted_ms"] / cell["replay_ms"] - 1)
        assert cell["predicted_multiple"] == cell["direct_ms"] / cell["predicted_ms"]
        assert cell["launches"] == cell["nodes"] == cell["replay_nodes"] + 1
        terms = cell["stage_ms"] + record["launch_us"] / 1e3 + cell["busy_ms"]
        assert cell["predicted_ms"] == pytest.approx(terms + cell["nodes"] * record["gap_us"] / 1e3)
    events = json.loads(trace.read_text())["traceEvents"]
    # One chunk alone: one embedding.
    assert [event["name"] for event in events].count("aten::embedding") == 1


def test_a_chunk_that_is_not_replayed_exits_1_and_says_why(capsys, monkeypatch) -> None:
    record, seen = host._record, []

    def refusing(work):
        seen.append(work)
        # The calibration is captured first, in two lengths.
        return record(work) if len(seen) <= 2 else (Reason.HOST_SYNC, "aten::item")

    monkeypatch.setattr(host, "_record", refusing)
    assert main([*TINY, "--chunks", "16"]) == 1
    out = capsys.readouterr().out
    assert "not replayed" in out
    assert f"was not replayed at chunks of 16: 0 of 31 replayed: {Reason.HOST_SYNC.value}" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chunks", "32,much"), "--chunks is '32,much'; expected whole numbers"),
        (("--chunks", "0"), "--chunks is '0'; expected different whole numbers from 1"),
        (("--contexts", "5,5"), "--contexts is '5,5'; expected different"),
        (("--chunks", "16", "-c", "15"), "context_len (-c) is 15; expected at least 16"),
        (("--seconds", "3"), "--seconds is 3; expected --pid beside it"),
        (("--json", "/proc/nothing/x"), "--json is '/proc/nothing/x'; expected a file to write"),
        (("--trace", "/proc/nothing/x"), "--trace is '/proc/nothing/x'; expected a file to write"),
    ],
)
def test_bad_input_is_named_before_anything_runs(arguments, words, capsys) -> None:
    assert main(["attribute", "-m", "random:nothing", *arguments]) == 1
    out = capsys.readouterr()
    assert words in out.err and not out.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pid", "7", "-m", "smollm2"), "-m is 'smollm2'; expected nothing beside --pid"),
        (("--pid", "7", "--chunks", "5"), "--chunks is '5'; expected nothing beside --pid"),
        (("--pid", "7", "--trace", "t"), "--trace is 't'; expected nothing beside --pid"),
        (("--pid", "0"), "--pid is [0]; expected ids of different running"),
        (("--pid", "7", "--pid", "7"), "--pid is [7, 7]; expected ids of different running"),
        (("--pid", "7", "--seconds", "0"), "--seconds is 0; expected 1 to 600 seconds"),
    ],
)
def test_what_contradicts_pid_is_refused(arguments, words, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["attribute", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_what_the_command_needs_is_imported_by_the_command_alone() -> None:
    code = "import sys, graphseed.cli.attribute; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert importlib.util.find_spec("graphseed.cli.attribute_report") is not None


Start = Callable[..., list[int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(policy, ...)` runs tiny models that go on answering; returns the process ids."""
    processes: list[subprocess.Popen[bytes]] = []
    root = Path(__file__).parents[2]

    def begin(policy: str) -> None:
        with (tmp_path / policy).open("w") as out, (tmp_path / f"{policy}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable, "-m", "graphseed.cli.main", "run", "-m",
                        "random:tiny-llama", "--device", "cpu", "-p", "hello", "-no-cnv", "-c",
                        "20000", "-n", "-1", "--ignore-eos", "-q", "--prompt-graphs", policy,
                    ],
                    stdout=out, stderr=log,
                    env={**os.environ, "PYTHONPATH": str(root / "src")},
                )
            )  # fmt: skip

    def start(*policies: str) -> list[int]:
        for policy in policies:
            begin(policy)
        deadline = time.monotonic() + 90
        for policy, process in zip(policies, processes, strict=True):
            answer = tmp_path / policy
            while not answer.stat().st_size:
                log = (tmp_path / f"{policy}.log").read_text()
                assert process.poll() is None and time.monotonic() < deadline, log
                time.sleep(0.1)
        return [process.pid for process in processes]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.skipif(not HAS_PY_SPY, reason="needs py-spy (extra attribute)")
def test_two_running_processes_are_sampled_side_by_side(start: Start, capsys, tmp_path) -> None:
    pids = start("off", "resident")
    result = tmp_path / "pid.jsonl"
    arguments = ["--seconds", "2", "--json", str(result)]
    rc = main(["attribute", "--pid", str(pids[0]), "--pid", str(pids[1]), *arguments])
    out, err = capsys.readouterr()
    if rc and "ptrace is not permitted" in err:
        pytest.skip("this machine does not permit ptrace")
    assert rc == 0, err
    assert f"pid {pids[0]}, policy off" in out and f"pid {pids[1]}, policy resident" in out
    [record] = [json.loads(line) for line in result.read_text().splitlines()]
    assert [found["policy"] for found in record["processes"]] == ["off", "resident"]
    for found in record["processes"]:
        # It decodes all the time: most of it is steps, and those are launches of decode graphs.
        assert found["samples"]["launch"] > 0 and 0.2 < found["submission_share"] < 1
