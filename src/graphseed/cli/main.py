"""The command line: parse, compose, call. The composition root.

Owns the parser, the logging configuration and the exit codes (0 good, 1 a finding or an error of
ours, 2 wrong usage). Imports torch only for commands that need it.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Final

import graphseed
from graphseed.capture import GraphseedError
from graphseed.cli import attribute, bench, demo, replay_plans, run, serve, verify

COMMANDS: Final = {
    "run": run, "demo": demo, "attribute": attribute, "bench": bench, "verify": verify,
    "serve": serve, "replay-plans": replay_plans,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    _configure_logging(args)
    command: Callable[[argparse.Namespace], int] = args.execute
    try:
        return command(args)
    except GraphseedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphseed",
        description="Captures a prompt's graph the first time it is seen, replays it ever after.",
    )
    parser.add_argument("--version", action="version", version=graphseed.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = module.SUMMARY
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_flags(sub)
        sub.set_defaults(execute=module.execute)
    return parser


def _configure_logging(args: argparse.Namespace) -> None:
    level = logging.WARNING if args.quiet else logging.DEBUG if args.verbose else logging.INFO
    logging.basicConfig(stream=sys.stderr, format="%(levelname).1s %(name)s: %(message)s")
    logging.getLogger("graphseed").setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
