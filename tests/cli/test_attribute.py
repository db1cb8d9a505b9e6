"""`graphseed attribute`: its tables, its records, its errors, and samples of a real run."""

import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from graphseed.capture.errors import Reason
from graphseed.cli import attribute
from graphseed.cli.attribute import Asked, ProfilingFailed, profile_apart
from graphseed.cli.main import main
from graphseed.drivers import host
from graphseed.engine.errors import DeviceMemoryError
from graphseed.measure.attribute.attribution import ChunkGrid
from graphseed.measure.attribute.profile import NothingProfiled

TINY = ("attribute", "-m", "random:tiny-llama", "--device", "cpu", "--dtype", "fp32")
HAS_PY_SPY = Path(sys.executable).with_name("py-spy").is_file() or shutil.which("py-spy")


def asked(model: str = "random:tiny-llama") -> Asked:
    return Asked(model, "cpu", "fp32", ChunkGrid((16,)), (1,))


def test_it_predicts_then_measures_and_says_what_is_worth_it(capsys, tmp_path) -> None:
    result, trace = tmp_path / "out" / "attribute.jsonl", tmp_path / "trace.json"
    arguments = ("--chunks", "16,40", "--contexts", "0,24", "--json", str(result))
    assert main([*TINY, *arguments, "--trace", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert "Warning" not in err
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
    few, many = record["calibration"]
    assert few["num_nodes"] < 200 < 500 < many["num_nodes"]
    for point in (few, many):  # the figure can be checked: the line goes through both
        terms = point["stage_ms"] + point["busy_ms"] + record["launch_us"] / 1e3
        made_ms = terms + point["num_nodes"] * record["gap_us"] / 1e3
        assert point["replay_ms"] == pytest.approx(made_ms)
    assert [(c["context"], c["chunk"]) for c in record["cells"]] == [
        (0, 16), (0, 40), (24, 16), (24, 40),
    ]  # fmt: skip
    for cell in record["cells"]:
        assert sum(cell["host_split"].values()) == pytest.approx(1)
        # Where the host is the device, it is idle outside its kernels, in the same run.
        assert cell["idle_share"] == pytest.approx(1 - cell["busy_ms"] / cell["profiled_host_ms"])
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
        # The near-empty decoders are captured first, at two depths.
        return record(work) if len(seen) <= 2 else (Reason.HOST_SYNC, "aten::item")

    monkeypatch.setattr(host, "_record", refusing)
    assert main([*TINY, "--chunks", "16"]) == 1
    out = capsys.readouterr().out
    assert "not replayed" in out
    words = rf"was not replayed at chunks of 16: 0 of \d+ replayed: {Reason.HOST_SYNC.value}"
    assert re.search(words, out)


@pytest.mark.cuda
def test_on_a_gpu_every_cell_is_replayed_and_the_record_is_whole(capfd, tmp_path) -> None:
    result = tmp_path / "attribute.jsonl"
    arguments = ("-m", "random:tiny-llama", "--device", "cuda", "--chunks", "32,512")
    assert main(["attribute", *arguments, "--contexts", "0,512", "--json", str(result)]) == 0
    out, err = capfd.readouterr()
    assert "not replayed" not in out and "Warning" not in out + err
    [record] = [json.loads(line) for line in result.read_text().splitlines()]
    assert record["device"] == "cuda:0"
    few, many = record["calibration"]
    assert 0 < few["num_nodes"] < many["num_nodes"] and 0 < few["busy_ms"] < few["replay_ms"]
    # From one node of a graph to the next takes time, but less than the host would need.
    assert 0 < record["gap_us"] < 3 and 0 < many["busy_ms"] < many["replay_ms"]
    assert [(c["context"], c["chunk"]) for c in record["cells"]] == [
        (0, 32), (0, 512), (512, 32), (512, 512),
    ]  # fmt: skip
    for cell in record["cells"]:
        assert cell["refused"] is None and cell["replay_runs"] >= 20
        assert cell["replay_nodes"] == cell["nodes"]  # the staged copy is in neither
        assert 0 < cell["busy_ms"] < cell["direct_ms"] and cell["host_ms"] > 0
        assert cell["host_split"]["kernel"] == 0 and cell["host_split"]["driver"] > 0
        assert all(cell[name] is not None for name in cell if name != "refused")


def test_the_process_that_profiles_has_ended_when_its_answer_is_there() -> None:
    told: list[str] = []
    found = profile_apart(asked(), told.append)
    assert len(found.decoders) == 2 and [cell.num_nodes > 100 for cell in found.cells] == [True]
    assert told[0] == "loading the model" and told[-1] == "context 0, chunk 16: profile"
    assert not multiprocessing.active_children()


def test_what_goes_wrong_in_the_process_that_profiles_is_said() -> None:
    with pytest.raises(ProfilingFailed, match="process of its own: .*random:nothing"):
        profile_apart(asked("random:nothing"), lambda text: None)
    assert not multiprocessing.active_children()


def test_a_process_that_dies_while_it_profiles_is_an_error_that_names_the_signal() -> None:
    def kill(text: str) -> None:
        if text.startswith("context"):
            [process] = multiprocessing.active_children()
            process.kill()

    with pytest.raises(ProfilingFailed, match="ended by SIGKILL; a system that is out of memory"):
        profile_apart(asked(), kill)
    assert not multiprocessing.active_children()


def test_an_interruption_leaves_no_process_behind() -> None:
    pids: list[int] = []

    def interrupt(text: str) -> None:
        pids.extend(process.pid for process in multiprocessing.active_children())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_apart(asked(), interrupt)
    assert not multiprocessing.active_children()
    [pid] = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_outlives_a_command_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from graphseed.cli.attribute import Asked, profile_apart\n"
        "from graphseed.measure.attribute.attribution import ChunkGrid\n"
        "import multiprocessing as mp\n"
        "def told(text):\n"
        "    if text.startswith('context'):\n"
        "        print(mp.active_children()[0].pid, flush=True)\n"
        "        time.sleep(60)\n"
        "grid = ChunkGrid((16,))\n"
        "profile_apart(Asked('random:tiny-llama', 'cpu', 'fp32', grid, (10**6,)), told)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 20
    stat = Path(f"/proc/{pid}/stat")
    # Whoever takes it over may be slow to notice that it ended.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            pytest.fail(f"process {pid} goes on")
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DeviceMemoryError("the KV memory", 1 << 30, 1 << 20, "lower -c"),
         "out of memory, as the model is loaded a second time there: out of device memory: the KV "
         "memory needs 1,024 MiB, 1 MiB are free; lower -c"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"),
         "out of memory, as the model is loaded a second time there: CUDA out of memory. Tried"),
        (RuntimeError("planted"), "RuntimeError: planted"),
        (ValueError(), "ValueError: no reason given"),
        (NothingProfiled("saw nothing"), "saw nothing"),
    ],
)  # fmt: skip
def test_an_error_in_the_other_process_keeps_its_words(error: Exception, words: str) -> None:
    assert attribute._words(error) == words


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
    assert importlib.util.find_spec("graphseed.cli.attribute.report") is not None


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
