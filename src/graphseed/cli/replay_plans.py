"""`graphseed replay-plans`: run recorded plans again with graphs disabled and compare bytes.

Owns the command alone; the record is the engine's.
"""

import argparse
from pathlib import Path
from typing import Final

from graphseed.capture import Selection
from graphseed.cli import options

SUMMARY: Final = "Run recorded plans again with graphs disabled, compare every byte."


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("file", type=Path, help="what --record-plans wrote")
    options.add_model_flags(parser, default=None)


def execute(args: argparse.Namespace) -> int:
    """Run the command: 0 when every digest is equal, else 1. Raises GraphseedError."""
    from graphseed.engine import record

    header = record.read_header(args.file)
    args.model = args.model or header["model"]
    args.dtype = header["dtype"] if args.dtype == "auto" else args.dtype
    loaded = options.load(args, Selection(), takes_rerankers=True)
    report = record.replay(args.file, loaded.model, loaded.driver)
    print(f"model: {args.model} on {loaded.driver.device}, recorded on {header['device']}")
    print(f"steps: {report.num_steps}, logits differ in {len(report.differing_steps)}")
    if report.differing_steps:
        first = ", ".join(str(number) for number in report.differing_steps[:8])
        print(f"first differing steps: {first}")
    print(f"KV rows: {'equal' if report.is_kv_equal else 'DIFFER'}")
    print(f"verdict: {'equal bytes' if report.is_equal else 'the bytes DIFFER'}")
    return 0 if report.is_equal else 1
