"""`graphseed bench --load`: its table, its words and its JSON."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from graphseed.capture import Namespace
from graphseed.capture.tally import Counts
from graphseed.cli import bench, options
from graphseed.cli.bench import load_report as report
from graphseed.engine import BadParameter, Request, SamplingParams
from graphseed.engine.record import ReplayReport
from graphseed.engine.request import Timings
from graphseed.measure import load
from graphseed.measure.load import LoadResult, LoadRun

TINY = ("-m", "random:tiny-llama", "--device", "cpu", "--dtype", "fp32", "-ub", "32", "--load")
SMALL = (
    "--requests", "6", "--clients", "1,3", "--load-prompt-lens", "5,40", "--load-new-tokens", "3",
)  # fmt: skip


def parsed(*args: str) -> argparse.Namespace:
    """The arguments of `graphseed bench --load` with a tiny model."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    bench.add_flags(parser)
    return parser.parse_args([*TINY, *args])


def run_of(
    queue: Sequence[float], prompt: Sequence[float], decode: Sequence[float], new: int = 11
) -> LoadRun:
    """Requests with these times in milliseconds; `decode` is tokens per second."""
    requests = []
    for q, p, rate in zip(queue, prompt, decode, strict=True):
        times = [0.0, q, q + p, q + p + 1e3 * (new - 1) / rate]
        timings = Timings(*(round(ms * 1e6) for ms in times))
        requests.append(
            Request((1,), SamplingParams(), output_ids=[0] * new, timings=timings)
        )  # fmt: skip
    return LoadRun(tuple(requests), 2.0)


def result_of(policy: str, run: LoadRun, num_clients: int = 8, **more: object) -> LoadResult:
    counts = {space: Counts(candidates=10, seeded=2, replayed=8) for space in Namespace}
    counts[Namespace.PROMPT] = more.pop("prompt", counts[Namespace.PROMPT])
    settings = {
        "capture_ms": 3.0, "num_released_by_decode": 0, "refused": (),
        "longest_capture_beside_stream_ms": 0.0, "proof": ReplayReport(20, (), True),
        "num_proven_replays": 4, **more,
    }  # fmt: skip
    return LoadResult(policy, num_clients, run, counts, **settings)


OFF = result_of("off", run_of([1, 2, 1, 2], [10, 20, 10, 20], [100, 110, 100, 110]))


def test_a_ttft_that_grew_because_decode_got_faster_is_told_from_a_slower_prompt():
    run = run_of([5, 6.1, 5, 6.2], [9, 19, 9, 19], [200, 221, 200, 220])
    text = report.compared(OFF, result_of("resident", run))
    assert text == (
        "resident, 8 clients: prompt 1.07x, decode 2.00x of off. Average TTFT grew (16.50 to "
        "19.57 ms): requests waited 4.08 ms longer for a slot or a step (queue), the prompt "
        "itself was faster (-1.00 ms); decode was faster, so clients were back with their next "
        "request sooner; 4 seeds took 3 ms in all to capture and instantiate, beside or inside "
        "these steps"
    )


def test_a_ttft_that_grew_because_the_prompt_got_slower_is_said_to():
    run = run_of([1, 2, 1, 2], [14, 24.1, 14, 24], [100, 110, 100, 110])
    none = {space: Counts(candidates=10, replayed=10) for space in Namespace}
    text = report.compared(OFF, replace(result_of("seed", run), counts=none))
    assert "seeds took" not in text
    assert "prompt 0.79x, decode 1.00x of off. Average TTFT grew (16.50 to 20.52 ms)" in text
    assert "the wait for a slot or a step (queue) did not clearly change (+0.00 ms)" in text
    assert "the prompt itself was slower (+4.03 ms, decode steps between its chunks" in text
    assert "sooner" not in text


def test_a_difference_within_the_noise_is_not_called_one():
    run = run_of([1, 2, 1.1, 1.9], [14, 17, 13, 18], [100, 110, 101, 109])
    text = report.compared(OFF, result_of("seed", run))
    assert "Average TTFT did not clearly change" in text
    assert "the prompt itself was not clearly slower (+0.50 ms, within the noise)" in text


def test_no_prompt_hits_are_said_with_their_reason():
    none = Counts(candidates=6, seeded=6)

    def words(policy: str, **more: object) -> str:
        found = report.findings([OFF, result_of(policy, OFF.run, **more)])
        return found[-1]

    released = words("seed", prompt=none, num_released_by_decode=6)
    assert released.startswith("seed, 8 clients: no prompt graph replayed: 6 were released by")
    assert "each batch-one decode step that finds no unfinished prompt" in released
    refused = Counts(candidates=6, refused=6, reasons=Counter())
    assert "refused (host synchronisation)" in words(
        "seed", prompt=refused, refused=("host synchronisation",)
    )
    assert "no moment for it came" in words("resident", prompt=Counts(candidates=6))
    assert "none of 6 seeded was seen a second time" in words("resident", prompt=none)
    # Where prompts did replay, and under off, nothing of it is said.
    assert len(report.findings([OFF, result_of("seed", OFF.run)])) == 1


def test_a_proof_without_a_replay_is_said_to_prove_none():
    found = report.findings([OFF, result_of("seed", OFF.run, num_proven_replays=0)])
    assert "equal bytes say nothing of replays" in found[-1]
    assert len(report.findings([OFF, result_of("off", OFF.run, num_proven_replays=0)])) == 1


def test_differing_bytes_are_named_first():
    proof = ReplayReport(30, (4, 7), False)
    found = report.findings([OFF, result_of("seed", OFF.run, proof=proof)])
    assert found[0] == (
        "seed, 8 clients: the bytes DIFFER from those with graphs disabled: logits differ at 2 "
        "steps (4, 7) and written K/V differs, of 30 recorded steps"
    )


def test_without_policy_off_no_multiple_is_said():
    found = report.findings([result_of("seed", OFF.run)])
    assert found == ["no multiple is said: policy off was not run beside the others"]


def test_the_table_is_markdown_with_a_line_for_each_policy_and_number_of_clients(capsys):
    assert bench.execute(parsed(*SMALL, "--policies", "off,resident")) == 0
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert tuple(cells[0]) == report.COLUMNS and len({len(line) for line in table}) == 1
    assert cells[1][0].startswith(":-") and all(cell.endswith("-:") for cell in cells[1][1:])
    assert [row[:2] for row in cells[2:]] == [
        [policy, clients] for clients in ("1", "3") for policy in ("off", "resident")
    ]
    assert all(row[-1] == "yes" for row in cells[2:])
    for row in cells[2:]:
        assert all(float(cell.replace(",", "")) > 0 for cell in row[2:10]), row
    assert "finding: resident, 1 client: prompt " in out
    assert "finding: resident, 3 clients: prompt " in out
    assert out.count("x, decode ") == 2  # never one half without the other
    assert "6 requests of 5,40 prompt tokens and 3 new ones, 3 slots of 43 tokens" in out


def test_json_is_one_document_on_the_last_line_and_words_are_on_stderr(capsys):
    args = (*SMALL, "-o", "json", "--policies", "off,seed", "--clients", "3")
    assert bench.execute(parsed(*args)) == 0
    done = capsys.readouterr()
    [line] = done.out.splitlines()
    rows = json.loads(line)
    assert [(row["policy"], row["clients"]) for row in rows] == [("off", 3), ("seed", 3)]
    for row in rows:
        assert row["new_tokens"] == 18 and row["equal_bytes"] is True
        mean = {name: row[name]["mean"] for name in ("queue_ms", "prompt_ms", "ttft_ms")}
        # Means of the same numbers, summed in another order.
        assert mean["ttft_ms"] == pytest.approx(mean["queue_ms"] + mean["prompt_ms"])
    assert "finding: seed, 3 clients: prompt" in done.err


def test_jsonl_is_a_line_for_each_row(capsys):
    args = parsed(*SMALL, "-o", "jsonl", "--policies", "disabled", "--clients", "3", "-np", "2")
    assert bench.execute(args) == 0
    [row] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["policy"] == "disabled" and row["counts"]["decode"]["replayed"] == 0


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_bar_is_on_stderr_where_a_person_watches_and_wants_it(is_quiet, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the stream for a terminal
    args = (*SMALL, "-o", "json", "--policies", "disabled", "--clients", "1")
    assert bench.execute(parsed(*args, *["-q"] * is_quiet)) == 0
    done = capsys.readouterr()
    assert ("requests" in done.err.split("slots of")[1]) is not is_quiet
    assert json.loads(done.out)[0]["clients"] == 1


def test_the_record_is_one_line_with_what_repeats_it(tmp_path, capsys):
    path = tmp_path / "out" / "load.jsonl"
    args = parsed(*SMALL, "--policies", "off,resident", "--clients", "2", "--json", str(path))
    assert bench.execute(args) == 0
    [record] = [json.loads(line) for line in path.read_text().splitlines()]
    assert record["benchmark"] == "load" and record["device"] == "cpu"
    assert (record["num_parallel"], record["context_len"], record["num_ubatch"]) == (2, 43, 32)
    assert record["equal_bytes"] is True and record["prompt_lens"] == [5, 40]
    off, resident = record["rows"]
    assert off["prompt_multiple"] == off["decode_ratio"] == 1.0
    assert resident["prompt_multiple"] > 0 and resident["decode_ratio"] > 0
    assert [text in capsys.readouterr().out for text in record["findings"][:1]] == [True]


def test_bytes_that_differ_exit_1(capsys, monkeypatch):
    replay = load.replay

    def differing(*args: object) -> ReplayReport:
        proof = replay(*args)
        return ReplayReport(proof.num_steps, (0,), proof.is_kv_equal)

    monkeypatch.setattr(load, "replay", differing)
    assert bench.execute(parsed(*SMALL, "--policies", "off", "--clients", "1")) == 1
    out = capsys.readouterr().out
    assert " NO |" in out and "finding: off, 1 client: the bytes DIFFER" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--clients", "1,x"), "--clients is '1,x'; expected numbers, lists a,b and ranges"),
        (("--clients", "0"), "--clients is 0; expected at least 1"),
        (("--clients", "2,2"), "--clients is '2,2'; expected each number once"),
        (("--requests", "7", "--clients", "8"), "--requests is 7; expected a whole number, at le"),
        (("--load-prompt-lens", ""), "--load-prompt-lens is ''; expected numbers, lists"),
        (("--load-new-tokens", "1"), "--load-new-tokens is 1; expected a whole number, at least 2"),
        (("-c", "100"), "-c is 100; expected 0 (what the load needs) or at least 2080"),
        (("-c", "-1"), "-c is -1; expected a whole number, at least 0"),
        (("-np", "1", "-np", "2"), "-np is ['1', '2']; expected one value with --load"),
        (("-np", "1,2"), "-np is '1,2'; expected a whole number"),
        (("-p", "64"), "-p is ['64']; expected nothing with --load: the prompts are drawn from"),
        (("--plot", "a.svg"), "--plot is 'a.svg'; expected nothing with --load"),
        (("--no-warmup",), "--no-warmup is True; expected nothing with --load: a load is warmed"),
        (("--delay", "2"), "--delay is 2.0; expected nothing with --load"),
        (("-m", "other"), "expected one model with --load"),
        (("-o", "csv"), "-o is 'csv'; expected md, json, jsonl with --load"),
        (("--policies", "off,often"), "--policies is 'off,often'; expected some of disabled, off"),
        (("--policies", "off,off"), "--policies is 'off,off'; expected some of"),
        (("--json", "/proc/nothing/x"), "--json is '/proc/nothing/x'; expected a file to write"),
    ],
)
def test_bad_input_is_named_before_anything_is_loaded(args, words, monkeypatch):
    def loaded(*_: object) -> None:
        raise AssertionError("loaded before the check")

    monkeypatch.setattr(options, "load", loaded)
    with pytest.raises(BadParameter) as caught:
        bench.execute(parsed(*args))
    assert words in str(caught.value)
