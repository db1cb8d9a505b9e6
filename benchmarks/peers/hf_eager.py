"""The Hugging Face model as it is: no padding, a growing cache, SDPA, one call for the prompt."""

import time
from collections.abc import Sequence
from typing import Any

import common
import torch
import transformers


class EagerSteps:
    """A module and the cache of its one sequence."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._named = common.cache_argument(module)
        self.reset()

    def reset(self) -> None:
        self._cache = transformers.DynamicCache(config=self._module.config)

    @torch.no_grad()
    def prompt(self, token_ids: Sequence[int]) -> None:
        ids = torch.tensor([token_ids], device=self._module.device)  # [1, tokens]
        # Only the last row of logits is read, as everywhere else in this comparison.
        self._module(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._named: self._cache})

    def decode(self, token_id: int) -> None:
        self.prompt([token_id])


def measure(args: Any) -> dict[str, Any]:
    driver, model = common.load(args)
    model.module.set_attn_implementation("sdpa")
    start = time.perf_counter()
    steps = EagerSteps(model.module)
    figures = common.measure_steps(steps, driver.synchronize, model.vocab_size, args, start)
    return figures | {
        "dtype": common.dtype_of(model),
        "peer_version": f"transformers {transformers.__version__}",
        "note": "attention sdpa, no padding",
    }


if __name__ == "__main__":
    common.run(measure, common.parser(__doc__).parse_args())
