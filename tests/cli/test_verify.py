"""`graphseed verify`: its tables, its verdict, its record and its exit code."""

import json

import pytest
import torch

SMALL = ("--dtype", "fp32", "--max-tokens", "24", "-np", "2", "--seed", "3")


def test_it_proves_equal_bytes_under_every_policy(cli, capsys, tmp_path):
    path = tmp_path / "out" / "verify.jsonl"
    assert cli("verify", *SMALL, "--json", str(path)) == 0
    out = capsys.readouterr().out
    for text in ("graphs disabled beside off, seed, resident", "--seed 3", "1 token", "16 tokens",
                 "decode of 2", "packed 1 + 15", "released by a batch-one decode",
                 "verdict: equal bytes in all"):  # fmt: skip
        assert text in out
    assert "finding" not in out and "difference" not in out
    [record] = [json.loads(line) for line in path.read_text().splitlines()]
    assert record["benchmark"] == "verify" and record["model"] == "random:tiny-llama"
    assert record["is_equal"] is True and record["differences"] == record["findings"] == []
    assert record["rounds"] == 3 and record["num_cases"] == len(record["digests"])
    assert list(record["policies"]) == ["off", "seed", "resident"]
    for name in ("seed", "resident"):
        counts = record["policies"][name]
        assert counts["replayed"] > 0 and counts["refused"] == 0
        assert counts["replayed_identities"] == counts["identities"] > 0
        assert counts["decode"]["replayed"] > 0
    assert record["policies"]["seed"]["released"] > 0
    assert record["against_hf"] is None and record["commit"]


def test_a_kernel_that_differs_under_capture_is_named_and_exits_1(
    cli, capsys, tmp_path, monkeypatch
):
    from graphseed.drivers.host import HostArena
    from graphseed.models.model import Model

    capture, forward, is_capturing = HostArena.capture, Model.forward, []

    def flagged(self, work):
        is_capturing.append(1)
        try:
            return capture(self, work)
        finally:
            is_capturing.clear()

    def disturbed(self, *args):
        logits = forward(self, *args)
        return logits * (1 + 1e-6) if is_capturing else logits

    monkeypatch.setattr(HostArena, "capture", flagged)
    monkeypatch.setattr(Model, "forward", disturbed)
    path = tmp_path / "verify.jsonl"
    args = (*SMALL, "--policies", "seed", "--rounds", "2", "--json", str(path))
    assert cli("verify", *args) == 1
    out = capsys.readouterr().out
    assert "difference: policy seed, 15 tokens, round 1, step 1, replayed" in out
    assert "logits differs at position 14 of sequence 0" in out
    assert "identity [prompt first=aten.embedding" in out and "no: seed" in out
    assert "differences from graphs disabled" in out and "verdict" not in out
    record = json.loads(path.read_text())
    assert record["is_equal"] is False
    assert record["differences"][0] | {"largest": 0.0, "identity": ""} == {
        "policy": "seed", "case": "15 tokens", "round": 1, "step": 1, "identity": "",
        "answered": "replayed (number 1)", "what": "logits", "kind": "differs",
        "layer": None, "sequence": 0, "position": 14, "num_rows": 1, "largest": 0.0,
    }  # fmt: skip


def test_graphs_that_are_refused_are_said_to_prove_nothing(cli, capsys, monkeypatch):
    from graphseed.models.model import Model

    forward = Model.forward

    def syncing(self, *args):
        logits = forward(self, *args)
        return logits if logits.sum().item() != 0.5 else logits * 1

    monkeypatch.setattr(Model, "forward", syncing)
    assert cli("verify", *SMALL, "--policies", "seed", "--rounds", "2") == 0
    out = capsys.readouterr().out
    assert "refused under seed: prompt graph of 16 tokens: host synchronisation" in out
    assert "nothing proven of prompt graphs under policy seed" in out


def test_against_hf_prints_how_far_the_plain_forward_is(cli, capsys, tmp_path):
    path = tmp_path / "verify.jsonl"
    args = (*SMALL, "--policies", "off", "--rounds", "2", "--against", "hf", "--json", str(path))
    assert cli("verify", *args) == 0
    out = capsys.readouterr().out
    assert "plain Hugging Face forward (sdpa attention)" in out and "tolerance 0.0002" in out
    assert "greedy tokens that differ: 0 of" in out
    against = json.loads(path.read_text())["against_hf"]
    assert against["is_close"] is True and against["num_rows"] > 20


def test_a_model_that_is_far_from_the_plain_forward_is_a_finding(cli, capsys, monkeypatch):
    from graphseed.models.model import Model

    forward = Model.forward

    def skewed(self, *args):
        logits = forward(self, *args)
        return logits + torch.linspace(0, 1, logits.shape[-1])

    monkeypatch.setattr(Model, "forward", skewed)
    args = (*SMALL, "--policies", "off", "--rounds", "2", "--against", "hf")
    assert cli("verify", *args) == 1
    out = capsys.readouterr().out
    assert "from the plain Hugging Face forward, more than 0.0002" in out
    assert "its margin" in out


def test_a_forward_pass_takes_the_smaller_of_b_and_ub(cli, capsys, tmp_path):
    path = tmp_path / "verify.jsonl"
    small = ("--dtype", "fp32", "--max-tokens", "4", "-np", "1", "--rounds", "2")
    assert cli("verify", *small, "--policies", "off", "-b", "3", "--json", str(path)) == 0
    assert json.loads(path.read_text())["num_ubatch"] == 3
    assert "ubatch 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--policies", "off,often"), "--policies is 'off,often'; expected one or more of off"),
        (("--max-tokens", "0"), "--max-tokens is 0; expected at least 2"),
        (("--rounds", "1"), "--rounds is 1; expected at least 2"),
        (("-np", "0"), "-np is 0; expected at least 1"),
        (("-b", "0"), "-b is 0; expected at least 1"),
        (("--seed", "-7"), "--seed is -7; expected -1 (random) or more"),
        (("--json", "/proc/nothing/x"), "--json is '/proc/nothing/x'; expected a file to write"),
    ],
)
def test_bad_input_is_named_before_anything_is_loaded(args, words, cli, capsys):
    assert cli("verify", *args) == 1
    out = capsys.readouterr()
    assert words in out.err and "model:" not in out.out


@pytest.mark.model
def test_smollm2_is_proven_on_this_machine(capsys):
    from graphseed.cli.main import main

    args = ["--device", "cpu", "-ub", "64", "--max-tokens", "100", "--rounds", "2"]
    assert main(["verify", "-m", "smollm2", *args, "--against", "hf"]) == 0
    assert "verdict: equal bytes" in capsys.readouterr().out
