"""`graphseed bench`: its flags, its forms of output, its notes and its exit code."""

import argparse
import csv
import functools
import io
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphseed.cli import bench
from graphseed.cli.bench import flags, load, plot
from graphseed.cli.bench.flags import numbers
from graphseed.cli.main import COMMANDS, main
from graphseed.drivers import open_driver
from graphseed.engine import BadParameter
from graphseed.engine.step import StepRunner
from graphseed.measure.bench import ceiling

SMALL = ("--dtype", "fp32", "-r", "2", "--policies", "off,seed")


@pytest.fixture(autouse=True)
def with_bench(monkeypatch):
    monkeypatch.setitem(COMMANDS, "bench", bench)


@functools.cache
def ceiling_of_this_machine() -> ceiling.Ceiling:
    return ceiling.measure_ceiling(open_driver("cpu"), (torch.bfloat16, torch.float32))


@pytest.fixture(autouse=True)
def ceiling_once(request, monkeypatch):
    """Measured once for all tests but those that ask for `real_ceiling`."""
    if "real_ceiling" not in request.fixturenames:
        once = ceiling_of_this_machine()
        monkeypatch.setattr(ceiling, "measure_ceiling", lambda driver, dtypes: once)


@pytest.fixture
def real_ceiling():
    """Measure it, as the command does."""


def checked(*args: str) -> flags.BenchRequest:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    bench.add_flags(parser)
    return flags.checked(parser.parse_args(args))


# Lists and ranges ---------------------------------------------------------------------------------

ITEM = st.one_of(
    st.tuples(st.integers(0, 50)),
    st.tuples(st.integers(0, 50), st.integers(0, 30)),
    st.tuples(st.integers(0, 50), st.integers(0, 30), st.just("+"), st.integers(1, 20)),
    st.tuples(st.integers(1, 50), st.integers(0, 300), st.just("*"), st.integers(2, 20)),
)


def written_and_meant(item: tuple) -> tuple[str, list[int]]:
    """An item as it is typed, and the numbers that lie in it."""
    first, length = item[0], item[1] if len(item) > 1 else 0
    last = first + length
    if len(item) == 1:
        return f"{first}", [first]
    if len(item) == 2:
        return f"{first}-{last}", [n for n in range(60 + 300) if first <= n <= last]
    _, _, kind, step = item
    text = f"{first}-{last}{kind}{step}"
    if kind == "+":
        return text, [n for n in range(81) if first <= n <= last and (n - first) % step == 0]
    powers = {first * step**k for k in range(20)}
    return text, [n for n in range(351) if n <= last and n in powers]


@given(st.lists(st.lists(ITEM, min_size=1, max_size=3), min_size=1, max_size=3))
def test_lists_and_ranges_mean_the_numbers_that_lie_in_them_in_order(flags):
    texts, expected = [], []
    for items in flags:
        pairs = [written_and_meant(item) for item in items]
        texts.append(",".join(text for text, _ in pairs))
        expected += [n for _, meant in pairs for n in meant]
    assert numbers("-p", texts, 0) == tuple(expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is none of them"),
        ("64,", "'' is none of them"),
        ("-5", "'-5' is none of them"),
        ("64-", "'64-' is none of them"),
        ("1-8/2", "'1-8/2' is none of them"),
        ("1.5", "'1.5' is none of them"),
        ("64k", "'64k' is none of them"),
        ("1-8+", "'1-8+' is none of them"),
        ("8-4", "the range 8-4 ends before it begins"),
        ("1-8+0", "the range 1-8+0 never reaches its end"),
        ("1-8*1", "the range 1-8*1 never reaches its end"),
        ("0-8*2", "the range 0-8*2 never reaches its end"),
        ("1-100000000", "at most 4096 values"),
    ],
)
def test_a_value_of_another_form_is_named_with_what_is_wrong(text, words):
    with pytest.raises(BadParameter, match=re.escape(words)) as raised:
        numbers("-p", [text], 0)
    assert f"-p is {text!r}; expected" in str(raised.value)


def test_flags_may_be_given_again_and_every_combination_runs():
    request = checked(
        "-m", "a,b", "-m", "c", "-p", "64,128", "-p", "256", "-n", "0", "-pg", "8,2", "-pg", "4,0",
        "-d", "0-512+512", "-ub", "128", "-np", "1-4*2", "--policies", "resident,off",
    )  # fmt: skip
    assert request.models == ("a", "b", "c")
    assert [test.name for test in request.groups[0]] == ["pp64", "pp128", "pp256", "pp8+tg2", "pp4"]
    assert len(request.groups) == 2 * 3
    assert request.listed == {"-ub", "-np"} and request.policies == ("off", "resident")


def test_without_flags_it_is_llama_benchs_tests_of_smollm2_under_every_policy():
    request = checked()
    assert request.models == ("smollm2",) and request.listed == frozenset()
    assert [[test.name for test in group] for group in request.groups] == [["pp512", "tg128"]]
    assert request.policies == ("disabled", "off", "seed", "resident")
    assert request.num_repetitions == 5 and request.warms_up and request.output == "md"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-p", "x"), "-p is 'x'; expected numbers, lists a,b and ranges first-last"),
        (("-ub", "0"), "-ub is 0; expected at least 1"),
        (("-np", "0"), "-np is 0; expected at least 1"),
        (("-p", "0", "-n", "0"), "-p and -n is 0; expected some tokens in one of -p, -n and -pg"),
        (("-pg", "512"), "-pg is '512'; expected two numbers PP,TG"),
        (("-pg", "0,0"), "-pg is '0,0'; expected two numbers PP,TG, not both 0"),
        (("-r", "0"), "-r is 0; expected at least 1 repetition"),
        (("--delay", "-1"), "--delay is -1.0; expected 0 to 3600 seconds"),
        (("-o", "sql"), "-o is 'sql'; expected one of md, json, jsonl, csv"),
        (("-m", "a,,b"), "expected names of models"),
        (("-c", "64"), "-c is 64; expected nothing without --load"),
        (("--policies", "off,often"), "--policies is 'off,often'; expected some of disabled, off"),
        (("--policies", "seed"), "off is what multiples are of"),
        (("--policies", "off,off"), "each once"),
        (("--json", "/proc/nothing/x"), "--json is '/proc/nothing/x'; expected a file to write"),
        (("--plot", "x.png", "-p", "8,16"), "expected a file whose name ends in .svg"),
        (
            ("--plot", "x.svg", "-p", "8"),
            "two or more prompt lengths to draw over (-p 64,512), got",
        ),
        (("--dtype", "fp4"), "dtype 'fp4' is not known"),
        (("--load", "-m", "smollm2"), "one model with --load"),
    ],
)
def test_bad_input_is_named_before_anything_is_loaded(args, words, cli, capsys, monkeypatch):
    def load_model(*args, **more):
        raise AssertionError("loaded")

    monkeypatch.setattr("graphseed.models.load.load_model", load_model)
    assert cli("bench", *args) == 1
    out = capsys.readouterr()
    assert words in out.err and out.out == ""


def test_a_missing_plot_library_is_told_before_anything_is_measured(cli, capsys, monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert cli("bench", "--plot", "x.svg", "-p", "8,16") == 1
    assert "pip install 'graphseed[plot]'" in capsys.readouterr().err


# What is printed ----------------------------------------------------------------------------------

HEAD = (
    "| model                  |       size |   params | backend | threads | n_ubatch "
    "|         test | policy   |                  t/s | prompt x | decode x |  hits "
    "| capt + inst ms |     MiB |  bytes | ceiling |",
    "| ---------------------- | ---------: | -------: | ------- | ------: | -------: "
    "| -----------: | -------- | -------------------: | -------: | -------: | ----: "
    "| -------------: | ------: | -----: | ------: |",
)
NO_GRAPH, GRAPH = ["", ""], ["# + #", "#"]  # what was captured, and what it holds
ROWS = [
    ["pp20 @ d5", "off", "# ± #", "#", "#", "0%", *NO_GRAPH],
    ["pp20 @ d5", "seed", "# ± #", "#", "#", "100%", *GRAPH],
    ["tg2 @ d5", "off", "# ± #", "", "#", "100%", *GRAPH],
    ["tg2 @ d5", "seed", "# ± #", "", "#", "100%", *GRAPH],
    ["pp9+tg2 @ d5", "off", "# ± #", "#", "#", "0%", *GRAPH],
    ["pp9+tg2 @ d5", "seed", "# ± #", "#", "#", "0%", *GRAPH],
]


@pytest.mark.usefixtures("real_ceiling")
def test_the_table_looks_like_llama_benchs_with_the_ceiling_first(cli, capsys):
    assert cli("bench", *SMALL, "-p", "20", "-n", "2", "-pg", "9,2", "-d", "5") == 0
    device, ceiling, blank, *lines = capsys.readouterr().out.splitlines()
    assert device.startswith("device:  cpu, ") and not blank
    number = r"[\d.e-]+"
    assert re.fullmatch(
        rf"ceiling: {number} TFLOP/s bfloat16, {number} TFLOP/s float32; {number} GB/s of a copy, "
        r"read and written \(medians, measured now\)", ceiling,
    )  # fmt: skip
    table = [line for line in lines if line.startswith("|")]
    assert tuple(table[:2]) == HEAD and {len(line) for line in table} == {len(HEAD[0])}
    cells = [[cell.strip() for cell in re.sub(r"\d+\.\d+", "#", line).split("|")[1:-1]]
             for line in table[2:]]  # fmt: skip
    threads = str(torch.get_num_threads())
    same = ["random:tiny-llama fp32", "# MiB", "# M", "CPU", threads, "16"]
    assert cells == [[*same, *row, "equal", "#%"] for row in ROWS]
    rest = "\n".join(lines)
    for words in ("t/s: mean", "bytes: SHA-256", "ceiling: least time", "this ran on a CPU",
                  "decode x of pp rows: of tg2 @ d5", "\n\nbuild: "):  # fmt: skip
        assert words in rest


def test_parameters_with_their_defaults_have_no_column(cli, capsys):
    assert cli("bench", *SMALL, "-p", "9", "-n", "0", "-ub", "512") == 0
    assert "n_ubatch" in capsys.readouterr().out  # 16 and 512
    assert checked("-ub", "512", "-b", "2048", "-np", "1").listed == frozenset()
    assert checked("-ub", "512,16").listed == {"-ub"}


def rows_of(out: str, form: str) -> list[dict]:
    if form == "csv":
        return list(csv.DictReader(io.StringIO(out)))
    lines = out.splitlines()
    return json.loads(lines[-1]) if form == "json" else [json.loads(line) for line in lines]


LLAMA_FIELDS = [
    "build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type",
    "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "type_k", "type_v",
    "devices", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts",
    "stddev_ts",
]  # fmt: skip


@pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
def test_every_form_has_llama_benchs_fields_and_a_decode_ratio_for_each_prompt(form, cli, capsys):
    assert cli("bench", *SMALL, "-p", "20", "-n", "0,2", "-np", "2", "-o", form) == 0
    out = capsys.readouterr()
    rows = rows_of(out.out, form)
    assert [(row["n_prompt"], row["policy"]) for row in rows] == [
        (number if form != "csv" else str(number), policy)
        for number in (20, 0) for policy in ("off", "seed")
    ]  # fmt: skip
    for row in rows:
        assert list(row)[: len(LLAMA_FIELDS)] == LLAMA_FIELDS
        assert float(row["decode_ratio"]) > 0 and row["decode_of"] == "tg2"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["test_time"])
        assert str(row["equal_bytes"]) == "True" and float(row["ceiling_share"]) > 0
        if form != "csv":
            assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
            assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
            tokens = 2 * (row["n_prompt"] + row["n_gen"])
            assert row["samples_ts"][0] == pytest.approx(
                tokens * 1e9 / row["samples_ns"][0], rel=1e-3
            )  # nanoseconds are rounded
    assert "ceiling:" in out.err and "note:" in out.err and "ceiling:" not in out.out


@pytest.mark.parametrize("form", ["md", "json", "jsonl", "csv"])
def test_a_prompt_without_a_decode_row_has_a_short_decode_beside_it(form, cli, capsys):
    assert cli("bench", *SMALL, "-p", "20", "-n", "0", "-o", form) == 0
    out = capsys.readouterr()
    if form == "md":
        row = next(line for line in out.out.splitlines() if "| seed " in line).split("|")
        assert float(row[11]) > 0 and float(row[10]) > 0  # prompt x, decode x
    else:
        assert all(float(row["decode_ratio"]) > 0 for row in rows_of(out.out, form))
    assert "decode x of pp rows: of tg16 after the prompt" in out.out + out.err


def test_the_record_has_one_line_a_model_and_both_halves(cli, capsys, tmp_path):
    path = tmp_path / "new" / "bench.jsonl"
    args = (*SMALL, "-m", "random:tiny-qwen3", "-p", "20", "-n", "2", "--json", str(path))
    assert cli("bench", *args) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["model"] for record in records] == ["random:tiny-llama", "random:tiny-qwen3"]
    record = records[0]
    assert record["benchmark"] == "bench" and record["dtype"] == "float32"
    assert record["ceiling"]["tflops"] > 0 and record["ceiling"]["gbytes_per_second"] > 0
    assert {"commit", "device_name", "torch", "command"} <= set(record)
    prompt, decode = record["rows"]
    assert (prompt["test"], prompt["n_prompt"], prompt["n_ubatch"]) == ("pp20", 20, 16)
    assert prompt["equal_bytes"] is True and decode["policies"]["seed"]["prompt_multiple"] is None
    seed = prompt["policies"]["seed"]
    assert seed["prompt_multiple"] > 0 and seed["decode_ratio"] > 0 and seed["hit_rate"] == 1
    assert len(seed["samples_ns"]) == 2 and seed["capture_ms"] > 0 and seed["bytes"] > 0


def test_bytes_that_differ_are_a_finding_and_exit_1(cli, capsys, monkeypatch):
    run = StepRunner.run

    def disturbed(self, plan, observer=None):
        logits = run(self, plan, observer)
        if self._cache.selection.prompt.value == "seed":
            self.kv.k[0].view(-1)[16 * 64] += 1  # first row of block 1
        return logits

    monkeypatch.setattr(StepRunner, "run", disturbed)
    assert cli("bench", *SMALL, "-p", "20", "-n", "0") == 1
    out = capsys.readouterr().out
    assert "bytes differ from policy off's: K/V under seed" in out
    assert out.count("DIFFER |") == 2 and "equal |" not in out


def test_what_was_measured_is_kept_when_a_later_model_fails(cli, capsys):
    args = ("-m", "random:nothing", "-p", "8", "-n", "0", "-o", "json")
    assert cli("bench", *SMALL, *args) == 1
    out = capsys.readouterr()
    assert [row["model_type"] for row in rows_of(out.out, "json")] == ["random:tiny-llama fp32"] * 2
    assert "there is no preset 'nothing'" in out.err


def test_seed_that_replays_nothing_and_losses_are_said(cli, capsys):
    assert cli("bench", *SMALL, "-p", "0", "-n", "0", "-pg", "16,2") == 0
    out = capsys.readouterr().out
    # Each prompt captures again, which takes far longer than sixteen tokens.
    assert re.search(
        r"loss: random:tiny-llama fp32 pp16\+tg2 \(-ub 16\) under seed: prompt 0\.\dx?", out
    )
    assert "seed replayed nothing in pp16+tg2" in out


def test_a_prompt_of_one_chunk_is_said_to_replay_only_without_decodes_between(cli, capsys):
    assert cli("bench", *SMALL, "-p", "16", "-n", "0") == 0
    assert "seeded anew in traffic with decodes between" in capsys.readouterr().out


def test_a_context_above_the_trained_one_is_warned_of_once(caplog):
    args = ("-m", "random:tiny-llama", "--device", "cpu", "-p", "0", "-n", "1", "-d", "2040")
    assert main(["bench", *SMALL, *args]) == 0
    warned = [r for r in caplog.records if "trained for" in r.getMessage()]
    assert len(warned) == 1


def test_progress_has_a_line_for_each_test(cli, capsys):
    assert cli("bench", *SMALL, "-p", "8", "-n", "1", "--progress", "-o", "jsonl") == 0
    out = capsys.readouterr()
    assert "random:tiny-llama: pp8 (1 of 2)" in out.err and "tg1 (2 of 2)" in out.err
    assert len(rows_of(out.out, "jsonl")) == 4


def test_the_plot_draws_each_policy_over_the_prompt_lengths_with_its_decode(cli, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot`")
    path = tmp_path / "new" / "bench.svg"
    args = ("-p", "16,8", "-n", "1", "-np", "1,2", "--plot", str(path))
    assert cli("bench", *SMALL, *args) == 0
    svg = path.read_text()
    assert svg.startswith("<?xml") and svg.rstrip().endswith("</svg>")
    for words in ("random:tiny-llama fp32, ubatch 16", "2 sequences", "multiple of policy off",
                  "prompt tokens per second", "off (decode 1.00)", "seed (decode "):  # fmt: skip
        assert any(words in comment for comment in re.findall("<!-- .* -->", svg)), words


def test_load_hands_over_to_the_clients_with_one_model(cli, monkeypatch):
    seen = []
    monkeypatch.setattr(load, "execute", lambda args: seen.append(args) or 7)
    assert cli("bench", "--load", "--clients", "1") == 7
    assert seen[0].model == "random:tiny-llama" and seen[0].device == "cpu"
