"""Pages that are generated from results."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GPU = {
    "date": "2026-11-29T10:00:00+00:00", "commit": "abc123", "device": "cuda:0",
    "device_name": "Some GPU, CUDA 13.0", "python": "3.12.3", "torch": "2.11.0",
    "transformers": "5.17.0",
}  # fmt: skip
CPU = GPU | {"device": "cpu", "device_name": "Some CPU, 2 threads"}


def result(benchmark, model="random:some-1b", source=GPU, command=None, **fields):
    command = command or f"graphseed {benchmark} -m {model}"
    return source | {"benchmark": benchmark, "model": model, "command": command} | fields


def cell(chunk, context=0, multiple=5.0, predicted_ms=1.1, replay_ms=1.0, **fields):
    return {
        "chunk": chunk, "context": context, "direct_ms": 5.0, "direct_spread_ms": 0.1,
        "host_ms": 4.9, "busy_ms": 0.9, "idle_share": 0.82, "launches": 400, "nodes": 400,
        "host_split": {"python": 2.0, "dispatcher": 1.0, "driver": 1.0},
        "predicted_ms": predicted_ms, "predicted_multiple": 4.5, "replay_ms": replay_ms,
        "multiple": multiple, "error": predicted_ms / replay_ms - 1 if replay_ms else None,
    } | fields  # fmt: skip


def attribute(cells, **fields):
    figures = {"dtype": "bfloat16", "gap_us": 1.05, "launch_us": 7.5, "cells": cells}
    return result("attribute", **figures, verdict="gains a large multiple", **fields)


def bench_policy(prompt_multiple=None, decode_ratio=None):
    return {
        "tokens_per_second": 1000.0, "stddev": 5.0, "samples_ns": [1, 2],
        "prompt_multiple": prompt_multiple, "decode_ratio": decode_ratio, "hit_rate": 1.0,
        "capture_ms": 20.0, "instantiate_ms": 3.5, "bytes": 2**20, "ceiling_share": 0.123,
    }  # fmt: skip


def bench(policies, n_depth=0, n_parallel=1, **fields):
    row = {
        "test": "pp512", "n_prompt": 512, "n_gen": 0, "n_depth": n_depth, "n_batch": 2048,
        "n_ubatch": 512, "n_parallel": n_parallel, "equal_bytes": True, "policies": policies,
    }  # fmt: skip
    ceiling = {"tflops": 700.0, "gbytes_per_second": 4000.0}
    return result("bench", dtype="bfloat16", ceiling=ceiling, rows=[row], **fields)


def peer(name, prompt=None, decode=None, error=None, model="random:some-1b", source=GPU):
    found = None if error else 1.0
    return result(
        "peers", model, source, "python benchmarks/peers.py", peer=name, prompt_tokens=512,
        new_tokens=64, prompt_tokens_per_second=prompt, prompt_stddev=found,
        decode_tokens_per_second=decode, setup_seconds=found, peer_version=found and "some 1.0",
        peer_command=f"python benchmarks/peers/some.py --{name}", note=None, error=error,
    )  # fmt: skip


def demo(model="random:some-1b", prompt_ms=(20.0, 20.0), **fields):
    def policy(name, ms):
        passes = [{"prompt_ms": value} for value in ms]
        counts = {"seeded": 1, "replayed": 7, "direct": 1, "refused": 0}
        return {"policy": name, "passes": passes, "decode_step_ms": 2.0,
                "counts": {"prompt": counts}}  # fmt: skip

    ratios = {
        "seed prompt 2": 2.0, "resident prompt 2": 4.0, "seed replayed observation": 5.0,
        "seed decode": 0.99,
    }  # fmt: skip
    policies = [policy("off", prompt_ms), policy("seed", (12.5, 10.0)), policy("resident", ())]
    return result(
        "demo", model, **{"num_ubatch": 512, "prompt_tokens": 4096, "new_tokens": 48,
        "dtype": "bfloat16", "equal_bytes": True, "findings": [], "multiples": ratios,
        "policies": policies} | fields,
    )  # fmt: skip


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("figures")


@pytest.fixture
def tree(tmp_path, figures):
    """A tree with results: call it with lines, get what its pages should hold."""

    def make(*lines, readme="before\n<!-- figures: begin -->\n<!-- figures: end -->\nafter\n"):
        folder = tmp_path / figures.RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "some.jsonl").write_text(text, encoding="utf-8")
        (tmp_path / "README.md").write_text(readme, encoding="utf-8")
        wanted = figures.wanted(tmp_path)
        return {path.name: text for path, text in wanted.items()}

    make.root = tmp_path
    return make


def run(tree, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks/figures.py"), "--root", str(tree.root)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


def test_no_results_and_an_empty_file_are_no_error(tree, tmp_path, figures):
    assert figures.wanted(tmp_path)[tmp_path / "docs/results.md"].endswith(
        "No result is committed yet.\n"
    )
    assert "No result is committed yet." in tree()["results.md"]


def test_the_check_fails_until_the_pages_are_written_and_again_after_a_new_result(tree):
    tree(demo())
    stale = run(tree, "--check")
    assert (stale.returncode, "docs/results.md is out of date" in stale.stdout) == (1, True)
    assert not (tree.root / "docs").exists()
    assert run(tree).returncode == 0
    assert run(tree, "--check").returncode == 0
    with (tree.root / "benchmarks/results/some.jsonl").open("a", encoding="utf-8") as out:
        out.write(json.dumps(demo(date="2026-11-30T00:00:00+00:00")) + "\n")
    stale = run(tree, "--check")
    assert stale.returncode == 1
    assert "results.md" in stale.stdout


def test_a_changed_readme_table_is_out_of_date(tree):
    tree(demo())
    run(tree)
    readme = tree.root / "README.md"
    readme.write_text(readme.read_text("utf-8").replace("5.00x", "9.00x"), encoding="utf-8")
    stale = run(tree, "--check")
    assert (stale.returncode, stale.stdout.split()[0]) == (1, "README.md")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "some.jsonl line 2 is no JSON"),
        ("[1]", "some.jsonl line 2 is a list"),
        ('{"benchmark": "demo"}', "some.jsonl line 2 has no model, date, commit"),
    ],
)
def test_a_malformed_line_names_file_and_line(tree, text, said):
    tree(demo())
    with (tree.root / "benchmarks/results/some.jsonl").open("a", encoding="utf-8") as out:
        out.write(text + "\n")
    found = run(tree, "--check")
    assert found.returncode == 1
    assert said in found.stderr


def test_a_result_without_its_fields_names_itself(tree):
    with pytest.raises(ValueError, match=r"some.jsonl line 1: the bench result.*KeyError 'rows'"):
        tree(result("bench"))


def test_entries_are_newest_first_and_a_later_run_of_the_same_command_takes_the_place(tree):
    page = tree(
        demo("random:old", date="2026-11-01T00:00:00+00:00"),
        demo("random:again", date="2026-11-02T00:00:00+00:00", commit="first0"),
        demo("random:new", date="2026-11-03T00:00:00+00:00"),
        demo("random:again", date="2026-11-04T00:00:00+00:00", commit="second"),
    )["results.md"]
    heads = [line for line in page.splitlines() if line.startswith("### ")]
    assert [head.split(" · ")[2] for head in heads] == ["random:again", "random:new", "random:old"]
    entry = page.split("### ")[1]
    assert "commit `second`" in entry.split("Earlier runs")[0]
    assert "- 2026-11-02T00:00:00+00:00, commit `first0`: seed 2.00x" in entry


def test_another_command_or_device_is_another_configuration(tree):
    page = tree(demo(), demo(command="graphseed demo -ub 128"), demo(source=CPU))["results.md"]
    assert page.count("\n### ") == 3
    assert page.count("On a CPU arithmetic is the wall clock") == 1


def test_the_page_of_a_demo_is_as_it_was(tree):
    assert tree(demo(findings=["something"]))["results.md"].partition("## Timeline\n")[2] == GOLDEN


GOLDEN = """
### 2026-11-29 · demo · random:some-1b · Some GPU, CUDA 13.0

2026-11-29T10:00:00+00:00, commit `abc123`; bfloat16; python 3.12.3, torch 2.11.0, transformers 5.17.0.

```
graphseed demo -m random:some-1b
```

4,096 prompt tokens in chunks of 512, 48 new tokens. Bytes of logits and KV: equal. Counts are of both passes.

| policy | pass | prompt ms | prompt tok/s | x off | decode x off | seeded | replayed | direct | refused |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| off | 1 | 20.0 | 204,800 | 1.00x | 1.00x | 1 | 7 | 1 | 0 |
| off | 2 | 20.0 | 204,800 | 1.00x | 1.00x | 1 | 7 | 1 | 0 |
| seed | 1 | 12.5 | 327,680 | 1.60x | 1.00x | 1 | 7 | 1 | 0 |
| seed | 2 | 10.0 | 409,600 | 2.00x | 1.00x | 1 | 7 | 1 | 0 |

- Finding: something

Not shown: spread: two passes are none, and where those of `off` lie apart the multiples are as uncertain. No waiting for a slot, one request. The multiple is mostly the host's time: another host has another multiple, and fewer kernels in a layer would make both sides faster and the multiple smaller. Decoding between the passes releases what `seed` captured, so its second pass seeds again.
"""  # noqa: E501


def summary_rows(page):
    section = page.split("## Which models gain")[1].split("## Timeline")[0]
    return [line for line in section.splitlines() if line.startswith("| `")], section


def test_the_summary_has_the_decode_ratio_of_bench_beside_each_multiple_and_the_largest_first(tree):
    policies = {"off": bench_policy(1.0, 1.0), "seed": bench_policy(4.0, 0.97),
                "resident": bench_policy(5.0, 0.99)}  # fmt: skip
    rows, section = summary_rows(
        tree(
            attribute([cell(32, multiple=1.02), cell(512, multiple=1.01)], model="random:large"),
            attribute([cell(32, multiple=9.0), cell(32, 32768, multiple=2.0), cell(64)]),
            bench(policies),
        )["results.md"]
    )
    assert rows == [
        "| `random:some-1b` | 0 | 9.00x (+10 %) | - | - | - | 0.97x |",
        "| `random:some-1b` | 32,768 | 2.00x (+10 %) | - | - | - | not measured |",
        "| `random:large` | 0 | 1.02x (+10 %) | - | 1.01x (+10 %) | - | not measured |",
    ]
    assert "3 of 3 cells at context 0." in section


def test_the_summary_counts_good_predictions_and_names_the_others(tree):
    good, bad = cell(32, predicted_ms=1.15), cell(512, predicted_ms=0.8)
    far = cell(512, 32768, predicted_ms=9.0)  # behind a context: not counted
    page = tree(attribute([good, bad, far, cell(2048, predicted_ms=1.2)]))["results.md"]
    _, section = summary_rows(page)
    assert "1 of 3 cells at context 0. Missed: `random:some-1b` chunk 512 (-20 %)" in section
    assert "chunk 2,048 (+20 %)" in section


def test_the_newest_cell_counts_and_a_refused_one_says_why(tree):
    refused = cell(128, multiple=None, replay_ms=None, refused="a host | synchronisation")
    rows, _ = summary_rows(
        tree(
            attribute([cell(32, multiple=3.0), cell(512, multiple=4.0)]),
            attribute([cell(32, multiple=2.0), refused], date="2026-12-01T00:00:00+00:00"),
        )["results.md"]
    )
    assert rows == [
        "| `random:some-1b` | 0 | 2.00x (+10 %) | a host &#124; synchronisation "
        "| 4.00x (+10 %) | - | not measured |"
    ]


def test_each_device_has_a_summary_of_its_own(tree):
    page = tree(attribute([cell(32)]), attribute([cell(32)], source=CPU))["results.md"]
    assert len(summary_rows(page)[0]) == 2
    assert "### Some CPU, 2 threads\n\n| model |" in page


def test_a_batch_of_streams_does_not_stand_beside_one_prompt(tree):
    page = tree(attribute([cell(32)]), bench({"seed": bench_policy(3.0, 0.5)}, n_parallel=8))
    assert summary_rows(page["results.md"])[0][0].endswith("| not measured |")


def test_no_prompt_multiple_stands_without_a_decode_ratio(tree):
    """Every table and headline with a gain has decode beside it, or says it was not measured."""
    row = {"policy": "off", "clients": 1, "hit_rate": {"prompt": 0.0}, "equal_bytes": True}
    spread = {"p50": 2.0, "p95": 3.0, "mean": 2.0}
    loads = {name: spread for name in ("queue_ms", "prompt_ms", "ttft_ms",
             "decode_tokens_per_second")} | {"all_tokens_per_second": 9.0}  # fmt: skip
    medians = dict.fromkeys(loads, 2.0)
    ttft = {"ttft_ms": 3.0, "step_ms": 2.0}
    page = tree(
        attribute([cell(32)]),
        bench({"off": bench_policy(1.0, 1.0), "seed": bench_policy(4.0)}),
        bench({"seed": bench_policy(4.0)}, date="2026-11-01T00:00:00+00:00"),
        peer("graphseed off", 100.0, 50.0), peer("other", 300.0, 25.0),
        demo(), demo(date="2026-11-01T00:00:00+00:00"),
        result("load", rows=[row | loads], equal_bytes=True),
        result("many", kind="first token", prompt_tokens=512, off=ttft, seed=ttft),
        result("many", kind="load", figures=medians, **row),
    )["results.md"]  # fmt: skip
    tables = [block for block in page.split("\n\n") if block.startswith("|")]
    gains = [block for block in tables if re.search(r"\dx", block)]
    assert len(gains) == 8
    assert all("decode" in block.splitlines()[0] for block in gains)
    earlier = [line for line in page.splitlines() if line.startswith("- 20") and "x" in line]
    assert len(earlier) == 2
    assert all("decode" in line for line in earlier)


def test_a_bench_shows_gains_and_losses_of_every_policy(tree):
    policies = {"off": bench_policy(1.0, 1.0), "seed": bench_policy(0.75, 1.01),
                "resident": bench_policy(4.0)}  # fmt: skip
    page = tree(bench(policies))["results.md"]
    assert "| pp512 | seed | 1,000.0 ± 5.0 | 0.75x | 1.01x | 100 % | 23.5 | 1.0 | 12.3 % " in page
    assert "| pp512 | resident | 1,000.0 ± 5.0 | 4.00x | not measured |" in page


def test_an_attribute_entry_splits_the_hosts_time_in_shares(tree):
    page = tree(attribute([cell(32)]))["results.md"]
    assert "| 32 | 0 | 5.00 | 0.10 | 4.90 | 50 / 25 / 25 % | 0.90 | 82 % | 400 | 1.10 |" in page
    assert "1.05 us from one node to the next, 7.5 us to launch. Verdict:" in page
    assert "So is the idle share" not in page


def test_an_attribute_entry_says_what_the_gap_was_calibrated_with(tree):
    few = {"num_nodes": 174, "replay_ms": 0.35, "busy_ms": 0.25, "stage_ms": 0.04}
    many = {"num_nodes": 1086, "replay_ms": 2.125, "busy_ms": 1.6, "stage_ms": 0.04}
    page = tree(attribute([cell(32)], calibration=[few, many], source=CPU))["results.md"]
    assert (
        "7.5 us to launch, from two near-empty decoders: 174 nodes in 0.350 ms, busy 0.250 and "
        "stage 0.040; 1,086 nodes in 2.125 ms, busy 1.600 and stage 0.040. Verdict:"
    ) in page
    assert "which the profiler makes slower. So is the idle share." in page
    older = tree(attribute([cell(32)], node_us=1.8, kernel_us=1.79))["results.md"]
    assert (
        "7.5 us to launch, from elementwise kernels: a node of 1.80 us, the kernel alone 1.79. "
        "Verdict:"
    ) in older


def test_a_verify_entry_shows_counts_and_differences(tree):
    counts = {"seeded": 9, "replayed": 40, "refused": 0, "released": 3}
    found = result(
        "verify", is_equal=False, num_cases=12, rounds=3, num_steps=1234,
        policies={"seed": counts}, differences=[{"policy": "seed", "layer": 2, "what": "K"}],
        against_hf={"largest": 0.01, "tokens": [1]},
    )  # fmt: skip
    page = tree(found)["results.md"]
    assert "12 cases in 3 rounds, 1,234 steps, beside graphs disabled: bytes DIFFER." in page
    assert "| seed | 9 | 40 | 0 | 3 |" in page
    assert "\n- Difference: policy seed, layer 2, what K\n" in page
    assert "\n- Against the Hugging Face forward: largest 0.01\n" in page


def test_a_verify_entry_does_not_call_equal_what_it_did_not_prove(tree):
    found = result(
        "verify", is_equal=True, num_cases=12, rounds=3, num_steps=1234, policies={},
        differences=[], unproven=["seed prompt"], findings=["policy seed replayed no prompt graph"],
    )  # fmt: skip
    page = tree(found)["results.md"]
    assert "bytes equal, nothing proven of seed prompt. Counts" in page
    assert "\n- Finding: policy seed replayed no prompt graph\n" in page


def test_a_bench_says_what_its_ratios_are_of(tree):
    line = bench({"off": bench_policy(1.0, 1.0)})
    assert "Decode beside" not in tree(line)["results.md"]
    line["rows"][0] |= {"decode_of": "tg32", "side_by_side": False}
    page = tree(line)["results.md"]
    assert "Decode beside a prompt alone (pp): of tg32. Memory did not hold all policies" in page
    assert "drift is in the ratios, ran pp512." in page


def test_lines_of_one_run_are_one_entry_and_a_peer_that_did_not_run_keeps_its_row(tree):
    page = tree(
        peer("graphseed off", 100.0, 50.0),
        peer("other", 50.0, 100.0),
        peer("third", error="no GPU"),
    )["results.md"]
    assert page.count("\n### ") == 1
    assert "| other | 50 ± 1 | 0.50x | 100.0 | 2.00x | 1.0 s | some 1.0 |" in page
    assert "| third | - | - | - | - | - | did not run: no GPU |" in page
    assert "- other: `python benchmarks/peers/some.py --other`" in page


def test_a_benchmark_without_an_entry_of_its_own_is_not_left_out(tree):
    page = tree(result("other", seconds=3.5, nested=[1]))["results.md"]
    assert "| 1 | seconds | 3.5 |" in page


MARKED = "a\n<!-- figures: begin -->\nx\n<!-- figures: end -->\nb\n"
PEERS_MARKED = MARKED + "<!-- peers: begin -->\nx\n<!-- peers: end -->\nc\n"


def test_readme_has_a_row_for_the_newest_gpu_demo_of_each_model(tree):
    readme = tree(
        demo("random:a", prompt_ms=(40.0, 40.0)),
        demo("random:b"),
        demo("random:a", date="2026-12-01T00:00:00+00:00"),
        demo("random:c", source=CPU),
        demo("random:d", policies=[], multiples={}),
    )["README.md"]
    rows = [line for line in readme.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `random:{name}` | 204,800 | 2.00x | 4.00x | 5.00x | 0.99x | equal |" for name in "ba"
    ]
    assert readme.startswith("before\n")
    assert readme.endswith("\nafter\n")


def test_a_readme_table_of_several_commits_names_all_of_them(tree):
    readme = tree(demo("random:a"), demo("random:b", commit="def456", num_ubatch=128))["README.md"]
    assert "commit `abc123`, `def456`." in readme and "chunks of 512, 128, bfloat16" in readme


def test_readme_shows_peers_between_their_markers_only_when_there_are_results(tree):
    assert tree(readme=PEERS_MARKED)["README.md"].endswith(
        "b\n<!-- peers: begin -->\n<!-- peers: end -->\nc\n"
    )
    lines = [peer("graphseed off", 100.0, 50.0), peer("other", 300.0, 25.0)]
    shown = tree(*lines, readme=PEERS_MARKED)["README.md"]
    assert "| other | 300 ± 1 | 3.00x | 25.0 | 0.50x | 1.0 s | some 1.0 |\n<!-- peers: end" in shown
    assert "```\npython benchmarks/peers.py\n```" in shown
    assert "peers" not in tree(*lines, readme=MARKED)["README.md"]
    on_cpu = [peer("graphseed off", 1.0, 1.0, source=CPU)]
    assert "graphseed off" not in tree(*on_cpu, readme=PEERS_MARKED)["README.md"]


def test_markers_that_are_no_pair_are_an_error(tree):
    with pytest.raises(ValueError, match="figures: begin.* once each"):
        tree(demo(), readme="<!-- figures: end -->\n<!-- figures: begin -->\n")


def test_committed_results_can_be_shown(figures):
    assert "## Timeline" in figures.wanted(ROOT)[ROOT / "docs/results.md"]
