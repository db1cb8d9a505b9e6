"""`graphseed serve` as it runs: what it says, how it ends, and its errors."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from graphseed.cli.main import main
from graphseed.cli.serve.flags import BadUsage, parse
from graphseed.cli.serve.table import USED

ROOT = Path(__file__).parents[2]
TINY = ("-m", "random:tiny-llama", "--device", "cpu", "-t", "1")


def test_help_names_every_flag_that_is_used_and_wrong_usage_exits_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert all(name in out for flag in USED for name in flag.names)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--x"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: invalid argument: --x\n"


def test_the_version_and_the_devices_are_told(capsys):
    assert main(["serve", "--version"]) == 0
    assert capsys.readouterr().out.startswith("graphseed ")
    assert main(["serve", "--list-devices"]) == 0
    assert capsys.readouterr().out.startswith("Available devices:\n")


def test_missing_packages_are_named_with_the_extra_that_has_them(monkeypatch, capsys):
    from graphseed.cli import serve

    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert main(["serve", *TINY]) == 1
    assert (
        "graphseed serve needs fastapi, httptools, msgspec, uvicorn; pip install 'graphseed[serve]'"
        in (capsys.readouterr().err)
    )


def test_a_bad_value_is_told_before_anything_is_loaded(capsys):
    assert main(["serve", "--pooling", "rank"]) == 1
    assert "error: --pooling is 'rank'" in capsys.readouterr().err


def test_log_lines_have_the_look_of_llama_server_and_go_to_a_file_too(tmp_path, caplog):
    from graphseed.cli.serve.log import configured

    path = tmp_path / "log"
    with configured(parse(["--log-file", str(path)], {})):
        logging.getLogger("graphseed.server").warning("one")
        logging.getLogger("graphseed.models.load").warning("two")
    logging.getLogger("graphseed.server").warning("three")
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r"\d+\.\d\d\.\d{3}\.\d{3} W srv  one", first)
    assert re.fullmatch(r"\d+\.\d\d\.\d{3}\.\d{3} W models\.load two", second)
    with pytest.raises(BadUsage, match="--log-file /no/such/place cannot be written"):
        configured(parse(["--log-file", "/no/such/place"], {})).__enter__()


class Running:
    """The command in a process of its own, as a user starts it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def address(self) -> str:
        return self.wait_for(r"listening on (http://\S+)").group(1)

    def wait_for(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = re.search(pattern, self.log)
            if found:
                return found
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        raise TimeoutError(self.log)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


@contextmanager
def running(tmp_path: Path, *argv: str, **environ: str) -> Iterator[Running]:
    log = tmp_path / "stderr"
    with log.open("w", encoding="utf-8") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "graphseed.cli.main", "serve", *TINY, "--port", "0", *argv],
            stderr=err, stdout=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environ},
        )  # fmt: skip
    try:
        yield Running(process, log)
    finally:
        process.kill()
        process.wait()


def ask(url: str, body: object = None) -> object:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=30) as response:
        return json.loads(response.read())


def test_the_command_serves_until_it_is_ended_and_tells_how_graphs_did(tmp_path):
    plans = tmp_path / "plans.jsonl"
    seed = {"GGML_CUDA_PROMPT_GRAPH_CAPTURE_SEED": "1"}
    argv = ("-c", "512", "-np", "2", "-ub", "16", "-a", "b,a", "-fa", "on", "-s", "42",
            "--record-plans", str(plans))  # fmt: skip
    with running(tmp_path, *argv, **seed) as server:
        address = server.address()
        server.wait_for("the model is loaded: ready")
        assert ask(f"{address}/health") == {"status": "ok"}
        props = ask(f"{address}/props")
        assert isinstance(props, dict)
        assert props["prompt_graphs"]["selected_by"] == f"{next(iter(seed))}=1"
        assert props["default_generation_settings"]["n_ctx"] == 256
        assert props["default_generation_settings"]["params"]["seed"] == 42
        assert props["model_alias"] == "a" and props["model_path"] == "random:tiny-llama"
        answer = ask(f"{address}/completion", {"prompt": "x" * 60, "n_predict": 3})
        assert isinstance(answer, dict) and answer["timings"]["prompt_replayed"] == 3
        assert server.end() == 0
        log = server.log
    assert "-fa means nothing here: attention is one paged kernel" in log
    assert "prompt graphs: device=cpu candidates=4 seeded=1 replayed=3" in log
    assert "shutting down: 0 answers are running" in log
    assert "Traceback" not in log
    assert json.loads(plans.read_text(encoding="utf-8").splitlines()[-1])


def test_sigterm_while_packages_are_imported_ends_the_command_at_once(tmp_path):
    with running(tmp_path) as server:
        server.wait_for("prompt graphs: policy=")
        time.sleep(0.1)
        assert server.end() == 0
        assert "Traceback" not in server.log


def test_sigterm_while_the_model_loads_ends_the_command_at_once(tmp_path):
    with running(tmp_path) as server:
        server.address()
        assert server.end() == 0
        assert "Traceback" not in server.log


def test_a_second_signal_does_not_wait_for_running_answers(tmp_path):
    with running(tmp_path, "-c", "2048", "-np", "1", "--drain-seconds", "100") as server:
        address = server.address()
        server.wait_for("the model is loaded: ready")
        body = {"prompt": "x", "n_predict": 2000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as response:
            response.readline()
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("shutting down: 1 answers are running")
            assert server.end(signal.SIGINT) == 130
            assert "ended at once by a second SIGINT" in server.log


def test_a_port_that_is_taken_and_a_model_that_is_not_there_are_one_clear_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with running(tmp_path, "--port", port) as server:
            assert server.process.wait(60) == 1
            assert f"error: cannot listen on 127.0.0.1, port {port}" in server.log
    with running(tmp_path, "-m", "random:nothing") as server:
        assert server.process.wait(60) == 1
        assert "error: " in server.log and "random:nothing" in server.log
        assert "Traceback" not in server.log
