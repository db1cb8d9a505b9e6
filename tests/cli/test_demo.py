"""`graphseed demo`: its tables, its verdict and its exit code."""

import json

import pytest

from graphseed.capture import GraphIdentity, Namespace
from graphseed.cli.demo import report as demo_report
from graphseed.engine.step import StepRunner
from graphseed.measure.demo import PolicyRun

SMALL = ("--prompt-tokens", "64", "-n", "4")


def test_the_demo_proves_equal_bytes_and_replays_under_every_policy(cli, capsys, tmp_path):
    path = tmp_path / "out" / "demo.jsonl"
    assert cli("demo", *SMALL, "--json", str(path)) == 0
    out = capsys.readouterr().out
    for text in ("policy disabled", "policy off", "policy seed", "policy resident",
                 "verdict: equal bytes", "This ran on a CPU", "came back"):  # fmt: skip
        assert text in out
    [record] = [json.loads(line) for line in path.read_text().splitlines()]
    assert record["equal_bytes"] is True and record["findings"] == []
    assert record["prompt_tokens"] == 64 and record["num_ubatch"] == 16
    seed = next(p for p in record["policies"] if p["policy"] == "seed")
    assert seed["counts"]["prompt"] == {
        "candidates": 8, "seeded": 2, "replayed": 6, "direct": 2, "refused": 0, "released": 2,
        "deferred": 0, "stale": 0,
    }  # fmt: skip
    resident = next(p for p in record["policies"] if p["policy"] == "resident")
    assert resident["counts"]["prompt"]["replayed"] == 7
    for name in ("seed prompt 2", "resident prompt 2", "seed decode"):
        assert record["multiples"][name] > 0


def test_bytes_that_differ_are_found_and_exit_1(cli, capsys, monkeypatch):
    run, count = StepRunner.run, []

    def disturbed(self, plan, observer=None):
        logits = run(self, plan, observer)
        count.append(1)
        if len(count) == 20:  # some step of a later policy
            self.kv.k[0].view(-1)[16 * 64] += 1  # first row of block 1
        return logits

    monkeypatch.setattr(StepRunner, "run", disturbed)
    assert cli("demo", *SMALL) == 1
    out = capsys.readouterr().out
    assert "finding: the KV bytes differ" in out and "verdict" not in out


def test_a_policy_that_should_replay_and_did_not_is_found_and_exits_1(cli, capsys, monkeypatch):
    build, count = StepRunner._build, []

    def always_new(self, *key):
        shape = build(self, *key)

        def hook(identity, plan):
            count.append(1)
            structure = (*identity.structure, ("call", len(count)))
            return GraphIdentity(
                identity.namespace, identity.device, identity.first_node, structure
            )

        self.identity_hook = hook
        return shape

    monkeypatch.setattr(StepRunner, "_build", always_new)
    assert cli("demo", *SMALL, "--policies", "off,seed") == 1
    out = capsys.readouterr().out
    assert "finding: policy seed replayed no prompt graph" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--policies", "off,often"), "--policies is 'off,often'; expected at least two of"),
        (("--policies", "off"), "--policies is 'off'; expected at least two of disabled, off"),
        (("-n", "-1"), "-n is -1; expected at least 1"),
        (("--prompt-tokens", "-5"), "--prompt-tokens is -5"),
        (("--json", "/proc/nothing/x"), "--json is '/proc/nothing/x'; expected a file to write"),
    ],
)
def test_bad_input_is_named_before_anything_runs(args, words, cli, capsys):
    assert cli("demo", *args) == 1
    out = capsys.readouterr()
    assert words in out.err and "policy" not in out.out


def test_findings_name_the_policy_whose_bytes_differ(monkeypatch):
    runs = [PolicyRun("off"), PolicyRun("seed")]
    digests = {"off": {("a", "k")}, "seed": {("b", "k")}}
    monkeypatch.setattr(PolicyRun, "digests", property(lambda self: digests[self.name]))
    for run in runs:
        run.counts = {Namespace.PROMPT.value: {"replayed": 1}}
    [finding] = demo_report.findings(runs)
    assert finding.startswith("the logits bytes differ: off ['a'], seed ['b']")


@pytest.mark.model
def test_the_demo_answers_a_question_about_its_text_in_english(cli, capsys):
    from graphseed.cli.main import main

    assert main(["demo", "--device", "cpu", "--policies", "off,seed"]) == 0
    out = capsys.readouterr().out
    assert "Captain" in out and "verdict: equal bytes" in out
