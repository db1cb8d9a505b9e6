"""A reranker on the command line: what cannot use one says what it is, before any work."""

import pytest

from graphseed.capture import Selection
from graphseed.cli.main import main
from graphseed.drivers import open_driver
from graphseed.engine import EngineConfig, EngineCore
from graphseed.engine.record import PlanRecorder
from graphseed.models import load_model

RERANKER = ("-m", "random:tiny-qwen3-reranker", "--device", "cpu")


@pytest.mark.parametrize(
    "command",
    [
        ("run", "-p", "a"), ("verify",), ("attribute",), ("bench", "-p", "32"), ("bench", "--load"),
        ("demo",),
    ],
)  # fmt: skip
def test_a_command_that_generates_says_what_the_model_is_and_measures_nothing(command, capsys):
    assert main([*command, *RERANKER]) == 1
    out = capsys.readouterr()
    assert "error: random:tiny-qwen3-reranker is a reranker: it scores" in out.err
    assert "Traceback" not in out.err and "pp32" not in out.out


def test_plans_of_a_reranker_are_replayed_like_any(tmp_path, capsys):
    driver, path = open_driver("cpu"), tmp_path / "plans.jsonl"
    model = load_model(
        RERANKER[1], device="cpu", dtype="fp32", bf16_is_fast=False, progress=False,
        takes_rerankers=True,
    )  # fmt: skip
    core = EngineCore(model, driver, EngineConfig(context_len=128, num_ubatch=32), Selection())
    core.observer = recorder = PlanRecorder(path, core)
    request = core.score_request(model.pair("a query", "a document of some length " * 3))
    core.submit(request)
    while not core.is_idle:
        assert all(delta.error is None for delta in core.step())
    recorder.close()
    core.close()
    assert main(["replay-plans", str(path), "--device", "cpu"]) == 0
    assert "verdict: equal bytes" in capsys.readouterr().out
