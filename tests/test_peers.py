"""Peers beside graphseed: each in a process of its own, on a CPU."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peers")


def peers_run(*arguments, timeout=120):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, str(ROOT / "benchmarks/peers.py"), "-m", "random:tiny-llama",
        "--device", "cpu", "--prompt-tokens", "32", "--new-tokens", "3", "-r", "2",
    ]  # fmt: skip
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, timeout=timeout
    )


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_peers_run_one_process_each_and_one_that_cannot_does_not_stop_the_others(tmp_path):
    path = tmp_path / "peers.jsonl"
    names = ["transformers continuous batching with CUDA graphs", "graphseed resident",
             "Hugging Face eager"]  # fmt: skip
    done = peers_run("--peers", ",".join(names), "--json", str(path))
    assert done.returncode == 0, done.stderr
    failed, resident, eager = lines_of(path)
    assert [failed["peer"], resident["peer"], eager["peer"]] == names
    assert failed["error"] == "RuntimeError: its CUDA graphs need a GPU"
    assert failed["prompt_tokens_per_second"] is None
    for line in (resident, eager):
        assert line["error"] is None
        assert min(line[name] for name in ("prompt_tokens_per_second", "setup_seconds",
                   "decode_tokens_per_second")) > 0  # fmt: skip
    assert eager["peer_command"].startswith("python benchmarks/peers/hf_eager.py -m random:tiny-")
    assert eager["command"].startswith("python benchmarks/peers.py -m random:tiny-llama")
    assert "--json" not in eager["command"]
    assert eager["dtype"] == resident["dtype"]
    # 3 + 2 prompts alone and 1 + 2 before decode steps; the first was observed, all others replay.
    assert resident["note"].startswith("7 of 8 prompt steps replayed")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_torch_compile_and_continuous_batching_run_too(tmp_path):
    path = tmp_path / "peers.jsonl"
    names = ["torch.compile reduce-overhead", "transformers continuous batching"]
    done = peers_run("--peers", ",".join(names), "--json", str(path), timeout=250)
    assert done.returncode == 0, done.stderr
    for line, name in zip(lines_of(path), names, strict=True):
        assert (line["peer"], line["error"]) == (name, None)
        assert min(line["prompt_tokens_per_second"], line["decode_tokens_per_second"]) > 0


def test_a_peer_that_takes_too_long_is_ended_and_says_so(peers):
    command = ["hf_eager.py", "-m", "random:tiny-llama", "--device", "cpu"]
    assert peers.ran(command, timeout_s=0.05) == {"error": "not done after 0.05 s"}


def test_a_peer_that_dies_says_its_last_words(peers, tmp_path, monkeypatch):
    (tmp_path / "dies.py").write_text("import sys\nsys.exit('out of something')\n")
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    assert peers.ran(["dies.py"], 60.0) == {"error": "ended with 1: out of something"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "none"], "--peers is 'none'; expected some of graphseed off,"),
        (["--peers", "llama.cpp llama-bench"], "expected some of"),
        (["-r", "0"], "--repetitions is 0; expected at least 1"),
        (["--gguf", "x"], "--gguf is 'x'; expected both"),
        (["--gguf", "x", "--llama-bench", "y"], "--llama-bench is 'y'; expected a file"),
        (["--json", "nowhere/x.jsonl"], "--json is 'nowhere/x.jsonl'"),
    ],
)
def test_wrong_arguments_of_peers_are_named_before_anything_starts(
    peers, capsys, monkeypatch, arguments, said
):
    monkeypatch.setattr(peers, "ran", lambda *_: pytest.fail("a peer was started"))
    assert peers.main(["--device", "cpu", *arguments]) == 2
    assert said in capsys.readouterr().err


LLAMA_TESTS = [
    {"n_prompt": 32, "n_gen": 0, "n_depth": 0, "avg_ts": 1000.5, "stddev_ts": 3.0},
    {"n_prompt": 32, "n_gen": 0, "n_depth": 32, "avg_ts": 1.0, "stddev_ts": 1.0},
    {"n_prompt": 0, "n_gen": 3, "n_depth": 0, "avg_ts": 2.0, "stddev_ts": 1.0},
    {"n_prompt": 0, "n_gen": 3, "n_depth": 32, "avg_ts": 100.25, "stddev_ts": 0.5},
]


def test_llama_bench_is_read_from_its_json(tmp_path):
    """A stand-in prints what llama-bench prints: its prompt at depth 0, its decode behind it."""
    every = {"build_commit": "0c1e57098", "build_number": 5, "backends": "CPU", "type_k": "f16",
             "model_type": "llama 1B BF16", "flash_attn": True, "n_gpu_layers": 0,
             "samples_ns": [1000, 1000]}  # fmt: skip
    text = json.dumps([every | test for test in LLAMA_TESTS])
    program, gguf, path = tmp_path / "llama-bench", tmp_path / "m.gguf", tmp_path / "peers.jsonl"
    seen = tmp_path / "seen"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {seen}\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    gguf.write_bytes(b"GGUF")
    done = peers_run(
        "--peers", "llama.cpp llama-bench", "--llama-bench", str(program), "--gguf", str(gguf),
        "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [line] = lines_of(path)
    assert (line["prompt_tokens_per_second"], line["decode_tokens_per_second"]) == (1000.5, 100.25)
    assert line["peer_version"] == "llama.cpp 0c1e57098 (5), CPU"
    assert seen.read_text().endswith(" -p 32 -n 3 -d 0,32 -r 2 -ub 512 -ngl 0 -o json\n")


def test_a_llama_bench_that_fails_is_an_error_with_its_last_words(tmp_path):
    program, gguf, path = tmp_path / "llama-bench", tmp_path / "m.gguf", tmp_path / "peers.jsonl"
    program.write_text("#!/bin/sh\necho 'cannot load model' >&2\nexit 3\n")
    program.chmod(0o755)
    gguf.write_bytes(b"GGUF")
    done = peers_run(
        "--peers", "llama.cpp llama-bench", "--llama-bench", str(program), "--gguf", str(gguf),
        "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 1
    assert lines_of(path)[0]["error"] == (
        "RuntimeError: llama-bench ended with 3: cannot load model"
    )
