"""Puts committed results where they are read: README's table, and what the demo shows on a CPU.

Question: do README and the demo show exactly the newest committed results? `--check` exits 1 when
they do not; without it the files are written.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/demo.jsonl"
FIGURES = ROOT / "src/graphseed/cli/demo_data/gpu_figures.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def newest_rows() -> list[dict[str, object]]:
    """The newest GPU result of each model, in the order of the file."""
    newest: dict[str, dict[str, object]] = {}
    if RESULTS.exists():
        for line in RESULTS.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["device"] != "cpu":
                newest.pop(record["model"], None)
                newest[record["model"]] = record
    return list(newest.values())


def figures_json(rows: list[dict[str, object]]) -> str:
    """What the package carries: a few fields of each row."""
    kept = ("model", "device_name", "prompt_tokens", "commit", "equal_bytes", "multiples")
    return json.dumps([{name: row[name] for name in kept} for row in rows], indent=1) + "\n"


def table(rows: list[dict[str, object]]) -> str:
    """README's table."""
    lines = [
        "| model | off, prompt tok/s | seed | resident, 2nd prompt | one chunk, replayed "
        "| decode, seed | bytes |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        ratios = row["multiples"]
        off = next(p for p in row["policies"] if p["policy"] == "off")
        ms = sorted(p["prompt_ms"] for p in off["passes"])
        rate = 1e3 * row["prompt_tokens"] * 2 / sum(ms)
        lines.append(
            f"| `{row['model']}` | {rate:,.0f} | {ratios['seed prompt 2']:.2f}x "
            f"| {ratios['resident prompt 2']:.2f}x | {ratios['seed replayed observation']:.2f}x "
            f"| {ratios['seed decode']:.2f}x | {'equal' if row['equal_bytes'] else 'DIFFER'} |"
        )
    if rows:
        first = rows[0]
        lines += [
            "",
            f"{first['prompt_tokens']:,}-token prompt, chunks of {first['num_ubatch']}, "
            f"{first['dtype']}, {first['device_name']}, torch {first['torch']}, commit "
            f"`{first['commit']}`. Multiples of policy `off` in the same run; the decode column is "
            "the ratio of median step times (1.00x: unchanged). Reproduce a row with",
            "",
            "```",
            f"graphseed demo -m {first['model']} --device cuda",
            "```",
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    rows = newest_rows()
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = {
        FIGURES: figures_json(rows),
        README: f"{before}{BEGIN}\n{table(rows)}\n{END}{after}",
    }
    stale = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not args.check:
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'is out of date' if args.check else 'written'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
