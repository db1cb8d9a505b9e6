"""llama.cpp, by its own llama-bench: a GGUF of the same architecture, prompt and decode apart.

Decode is measured behind a prompt of the same length, as for the other peers.
"""

import json
import subprocess
import time
from typing import Any

import common

ALL_LAYERS = 999  # more than a model has: all on the GPU


def command(args: Any) -> list[str]:
    """The command line of llama-bench."""
    depths = ",".join(str(depth) for depth in dict.fromkeys((0, args.prompt_tokens)))
    on_gpu = args.device != "cpu"
    return [
        args.llama_bench, "-m", args.gguf, "-p", str(args.prompt_tokens), "-n",
        str(args.new_tokens), "-d", depths, "-r", str(args.repetitions), "-ub",
        str(args.ubatch_size), "-ngl", str(ALL_LAYERS if on_gpu else 0), "-o", "json",
    ]  # fmt: skip


def row(rows: list[dict[str, Any]], **wanted: int) -> dict[str, Any]:
    """The one test with these values. Raises ValueError when it is not there."""
    for found in rows:
        if all(found.get(name) == value for name, value in wanted.items()):
            return found
    raise ValueError(f"llama-bench printed no test with {wanted}")


def measure(args: Any) -> dict[str, Any]:
    argv = command(args)
    start = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"llama-bench ended with {done.returncode}: {said[-1]}")
    return figures_of(json.loads(done.stdout), args, seconds)


def figures_of(rows: list[dict[str, Any]], args: Any, seconds: float) -> dict[str, Any]:
    """What other peers say too, from llama-bench's tests and how long all of it took."""
    prompt = row(rows, n_prompt=args.prompt_tokens, n_gen=0, n_depth=0)
    decode = row(rows, n_prompt=0, n_gen=args.new_tokens, n_depth=args.prompt_tokens)
    timed = sum(sum(found.get("samples_ns", ())) for found in rows) / 1e9
    return {
        "prompt_tokens_per_second": prompt["avg_ts"],
        "prompt_stddev": prompt["stddev_ts"],
        "decode_tokens_per_second": decode["avg_ts"],
        "decode_stddev": decode["stddev_ts"],
        "setup_seconds": max(0.0, seconds - timed),  # loading, and filling contexts, included
        "dtype": prompt["model_type"],
        "peer_version": f"llama.cpp {prompt['build_commit']} ({prompt['build_number']}), "
        f"{prompt['backends']}",
        "note": f"KV {prompt['type_k']}, flash attention {prompt['flash_attn']}, "
        f"{prompt['n_gpu_layers']} layers on the GPU, loading is in what it was ready after",
    }


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512)
    common.run(measure, parser.parse_args())
