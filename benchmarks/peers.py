"""Who else runs a short prompt, and how fast: one process for each peer, one after another.

Question: on this device, with the same architecture, dtype and random tokens, how many prompt
tokens and how many decode tokens a second does each of them reach, and how long does it take to
get ready? A peer that cannot run keeps its row, with the reason. Each line of --json has the exact
command of this program and of the peer.

    python benchmarks/peers.py -m random:smollm2-135m --device cuda --json FILE
    python benchmarks/peers.py ... --llama-bench PATH --gguf FILE
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from graphseed.capture import GraphseedError
from graphseed.cli import options
from graphseed.drivers import open_driver
from graphseed.engine.errors import BadParameter
from graphseed.measure.provenance import provenance

FOLDER = Path(__file__).with_suffix("")
PEERS: Mapping[str, tuple[str, ...]] = {
    "graphseed off": ("graphseed_session.py", "--policy", "off"),
    "graphseed seed": ("graphseed_session.py", "--policy", "seed"),
    "graphseed resident": ("graphseed_session.py", "--policy", "resident"),
    "Hugging Face eager": ("hf_eager.py",),
    "torch.compile reduce-overhead": ("hf_compile.py",),
    "transformers continuous batching": ("hf_continuous.py",),
    "transformers continuous batching with CUDA graphs": ("hf_continuous.py", "--graphs"),
    "llama.cpp llama-bench": ("llama_bench.py",),
}
BASELINE, LLAMA = "graphseed off", "llama.cpp llama-bench"
FIGURES = (
    "prompt_tokens_per_second", "prompt_stddev", "decode_tokens_per_second", "decode_stddev",
    "setup_seconds", "dtype", "peer_version", "note",
)  # fmt: skip


def flags() -> argparse.ArgumentParser:
    """The flags of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="random:smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64, help="decode steps of a repetition")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512, help="graphseed, llama.cpp")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--peers", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each peer")
    parser.add_argument("--llama-bench", metavar="PATH", help="llama.cpp's llama-bench")
    parser.add_argument("--gguf", metavar="FILE", help="the same architecture, for llama-bench")
    parser.add_argument("--json", type=Path, help="append one line for each peer")
    return parser


def chosen(args: argparse.Namespace) -> list[str]:
    """The peers to run. Raises before anything is started.

    BadParameter, and SelectorError where every graph is turned off (I12).
    """
    options.require_graphs("benchmarks/peers.py")
    for name in ("prompt_tokens", "new_tokens", "repetitions", "ubatch_size", "timeout"):
        if getattr(args, name) <= 0:
            raise BadParameter(f"--{name.replace('_', '-')}", getattr(args, name), "at least 1")
    if (args.llama_bench is None) != (args.gguf is None):
        given = "--gguf" if args.llama_bench is None else "--llama-bench"
        raise BadParameter(given, args.llama_bench or args.gguf, "both --llama-bench and --gguf")
    for flag, path in (("--llama-bench", args.llama_bench), ("--gguf", args.gguf)):
        if path is not None and not Path(path).is_file():
            raise BadParameter(flag, path, "a file")
    if args.json is not None and not args.json.parent.is_dir():
        raise BadParameter("--json", str(args.json), "a file in a folder that exists")
    if args.peers is None:
        return [name for name in PEERS if name != LLAMA or args.llama_bench]
    names: list[str] = args.peers.split(",")
    if any(name not in PEERS or (name == LLAMA and not args.llama_bench) for name in names):
        expected = f"some of {', '.join(PEERS)} (the last with --llama-bench and --gguf)"
        raise BadParameter("--peers", args.peers, expected)
    return names


def command_of(name: str, args: argparse.Namespace) -> list[str]:
    """A peer's command line, from the script on."""
    script, *own = PEERS[name]
    command = [
        script, *own, "-m", args.model, "--device", args.device, "--dtype", args.dtype,
        "--prompt-tokens", str(args.prompt_tokens), "--new-tokens", str(args.new_tokens),
        "-r", str(args.repetitions),
    ]  # fmt: skip
    if script in ("graphseed_session.py", "llama_bench.py"):
        command += ["-ub", str(args.ubatch_size)]
    if script == "llama_bench.py":
        command += ["--llama-bench", args.llama_bench, "--gguf", args.gguf]
    return command


def ran(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run one peer to its end: its figures, or {"error": why there are none}."""
    with subprocess.Popen(
        [sys.executable, str(FOLDER / command[0]), *command[1:]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {timeout_s:g} s"}
        finally:
            end_group(process.pid)
    figures = last_object(out)
    if figures is not None and (process.returncode == 0 or "error" in figures):
        return figures
    said = ([line for line in err.splitlines() if line.strip()] or ["nothing on stderr"])[-1]
    return {"error": f"ended with {process.returncode}: {said.strip()}"}


def end_group(group: int) -> None:
    """End what is left of a peer: compilers start processes of their own."""
    with contextlib.suppress(ProcessLookupError):  # nothing was left
        os.killpg(group, signal.SIGKILL)


def last_object(text: str) -> dict[str, Any] | None:
    """The JSON object on the last line that is not empty, where there is one."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def record_of(
    name: str, command: Sequence[str], found: Mapping[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """One peer's line, without where it was measured."""
    return {
        "benchmark": "peers",
        "model": args.model,
        "peer": name,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "repetitions": args.repetitions,
        **{field: found.get(field) for field in FIGURES},
        "peer_command": f"python benchmarks/peers/{shlex.join(command)}",
        "error": found.get("error"),
    }


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What was measured, multiples of graphseed off beside it, prompt and decode both."""
    base = next((row for row in rows if row["peer"] == BASELINE and not row["error"]), {})
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("peer", "prompt tok/s", "x off", "decode tok/s", "x off", "ready after"):
        table.add_column(name, justify="left" if name == "peer" else "right")
    for row in rows:
        if row["error"]:
            table.add_row(row["peer"], "-", "-", "-", "-", "-")
            continue
        prompt, decode = row["prompt_tokens_per_second"], row["decode_tokens_per_second"]
        table.add_row(
            row["peer"], f"{prompt:,.0f} ± {row['prompt_stddev']:,.0f}",
            multiple(prompt, base.get("prompt_tokens_per_second")), f"{decode:,.1f}",
            multiple(decode, base.get("decode_tokens_per_second")),
            f"{row['setup_seconds']:.1f} s",
        )  # fmt: skip
    return table


def multiple(rate: float, base: float | None) -> str:
    """A rate as a multiple of another."""
    return f"{rate / base:.2f}" if base else "-"


def main(argv: Sequence[str] | None = None) -> int:
    args = flags().parse_args(argv)
    try:
        names, driver = chosen(args), open_driver(args.device)
    except GraphseedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    source = provenance(driver.device, driver.description, "python benchmarks/peers.py")
    rows = []
    for name in names:
        command = command_of(name, args)
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = ran(command, args.timeout)
        if found.get("error"):
            print(f"{name}: {found['error']}", file=sys.stderr, flush=True)
        rows.append(record_of(name, command, found, args))
        if args.json is not None:  # at once: what was measured is kept, whatever comes after
            with args.json.open("a", encoding="utf-8") as out:
                out.write(json.dumps(source | rows[-1]) + "\n")
    console = Console()
    console.print(table_of(rows))
    for row in rows:
        console.print(f"{row['peer']}: {row['error'] or row['note']}", highlight=False)
    return 0 if any(not row["error"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
