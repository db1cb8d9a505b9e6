"""Many clients, as a program: wrong arguments are named before anything is loaded."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DISABLE = "GGML_CUDA_DISABLE_GRAPHS"


@pytest.fixture
def many(monkeypatch):
    monkeypatch.delenv(DISABLE, raising=False)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("many")
    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    return module


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--requests", "31"], "--requests is 31; expected at least 32"),
        (["--rounds", "0"], "--rounds is 0; expected at least 1"),
        (["--proven", "0"], "--proven is 0; expected at least 1"),
        (["-c", "100"], "-c is 100; expected at least 2080"),
        (["--json", "nowhere/x.jsonl"], "--json is 'nowhere/x.jsonl'; expected a file in a folder"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_loaded(many, capsys, arguments, said):
    assert many.main(["--device", "cpu", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_numbers_of_clients_are_whole_and_above_0(many, capsys):
    with pytest.raises(SystemExit):
        many.main(["--clients", "1,0"])
    assert "--clients" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["many", "peers"])
def test_I12_nothing_is_measured_where_every_graph_is_turned_off(
    many, capsys, monkeypatch, program
):
    monkeypatch.setenv(DISABLE, "1")
    assert importlib.import_module(program).main(["--device", "cpu"]) == 2
    assert f"{DISABLE} is set" in capsys.readouterr().err
