"""Puts committed results where they are read: docs/results.md, README's tables, the demo on a CPU.

Question: do those pages show exactly what benchmarks/results holds? `--check` exits 1 when they do
not; without it they are written. How they look is in pages/.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pages import readme, results, timeline

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
FIGURES = "src/graphseed/cli/demo/data/gpu_figures.json"
PAGE, README = "docs/results.md", "README.md"


def wanted(root: Path) -> dict[Path, str]:
    """Every generated file of a tree and what it should hold. Raises BadLine, BadMarkers."""
    runs = results.read(root / RESULTS)
    files = {
        root / FIGURES: readme.carried(readme.newest_demos(runs)),
        root / PAGE: timeline.page(runs),
    }
    path = root / README
    if path.exists():
        files[path] = readme.filled(path.read_text(encoding="utf-8"), runs)
    return files


def stale(files: dict[Path, str]) -> list[Path]:
    """Files that hold something else, or are not there."""
    return [
        path
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree (default: this one)")
    args = parser.parse_args(argv)
    try:
        files = wanted(args.root)
    except (results.BadLine, readme.BadMarkers) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = stale(files)
    for path in found:
        if args.check:
            print(f"{path.relative_to(args.root)} is out of date: run python benchmarks/figures.py")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
        print(f"{path.relative_to(args.root)} written")
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
