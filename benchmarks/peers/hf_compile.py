"""The Hugging Face model under torch.compile(mode="reduce-overhead"), with a static cache.

A process of its own: reduce-overhead clears the cuBLAS workspaces of whatever shares its process.
The prompt and the decode step are each compiled for their shape; that time is in the setup.
"""

import time
from collections.abc import Sequence
from typing import Any

import common
import torch
import transformers
from torch._dynamo.utils import counters

MODE = "reduce-overhead"


class CompiledSteps:
    """A compiled forward and one static cache, written from the start again at each reset."""

    def __init__(self, module: Any, cache_len: int) -> None:
        self._module = module
        self._named = common.cache_argument(module)
        self._cache = transformers.StaticCache(config=module.config, max_cache_len=cache_len)
        self._forward = module.forward
        # One call outside of the compiler makes the cache's tensors, with addresses that it may
        # take as fixed; without that it does not use graphs for steps that write into them.
        self.prompt([0])
        self._forward = torch.compile(module.forward, mode=MODE)

    def reset(self) -> None:
        self._cache.reset()

    @torch.no_grad()
    def prompt(self, token_ids: Sequence[int]) -> None:
        ids = torch.tensor([token_ids], device=self._module.device)  # [1, tokens]
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        self._forward(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._named: self._cache})

    def decode(self, token_id: int) -> None:
        self.prompt([token_id])


def measure(args: Any) -> dict[str, Any]:
    driver, model = common.load(args)
    model.module.set_attn_implementation("sdpa")
    start = time.perf_counter()
    steps = CompiledSteps(model.module, args.prompt_tokens + args.new_tokens)
    figures = common.measure_steps(steps, driver.synchronize, model.vocab_size, args, start)
    skips = counters["inductor"]["cudagraph_skips"]
    graphs = "no graphs on a CPU" if driver.device == "cpu" else f"graphs skipped {skips} times"
    return figures | {
        "dtype": common.dtype_of(model),
        "peer_version": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "note": f"mode {MODE}, {graphs}, static cache of "
        f"{args.prompt_tokens + args.new_tokens} tokens, attention sdpa",
    }


if __name__ == "__main__":
    common.run(measure, common.parser(__doc__).parse_args())
