"""Which of transformers' ways to compute experts a mixture-of-experts model runs with.

Owns that choice alone. It must be made once, before the model serves: it is part of what a
recording bakes in.
"""

import logging
from typing import Any, Final

import torch

_log = logging.getLogger(__name__)

PROBE_EXPERTS: Final = "batched_mm"  # runs on fake tensors in every dtype

_NUM_TOKENS: Final = 512  # of a step as the engine plans it by default
_GATHER_LIMIT_BYTES: Final = 4 * 2**30
_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def choose_experts(module: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Name of the experts implementation for `module`; None for a model without experts.

    `grouped_mm` reads the weights in place and takes its offsets as a tensor: the cpu has it for
    every dtype. A GPU (Hopper on) has a kernel for bf16; for fp32 and fp16 torch reads the offsets
    and loops over the experts on the host, which cannot be recorded. So those take `batched_mm`,
    which gathers a copy of the weights for each token and chosen expert. That is small for small
    models; where one step would gather more than 4 GiB, `grouped_mm` is right again: its results
    are exact, and its graphs are refused.
    """
    config = module.config.get_text_config()
    num_experts = next((n for n in (getattr(config, c, None) for c in _COUNTS) if n), None)
    if num_experts is None:
        return None
    if device.type == "cpu" or dtype == torch.bfloat16:
        return "grouped_mm"
    gathered = gathered_bytes(module, num_experts, config.num_experts_per_tok)
    if gathered <= _GATHER_LIMIT_BYTES:
        return "batched_mm"
    _log.warning(
        "experts in %s on %s would gather %.0f GiB for a step of %d tokens: they run as "
        "grouped_mm, which cannot be captured there; take bf16 to replay prompts of this model",
        str(dtype).removeprefix("torch."),
        device,
        gathered / 2**30,
        _NUM_TOKENS,
    )
    return "grouped_mm"


def gathered_bytes(module: Any, num_experts: int, num_chosen: int) -> int:
    """Bytes that batched_mm copies for one layer in a step of 512 tokens."""
    largest = 0
    for part in module.modules():
        weights = [w for w in part.parameters(recurse=False) if w.dim() == 3]
        stacked = [w.nbytes // num_experts for w in weights if w.shape[0] == num_experts]
        largest = max(largest, sum(stacked))
    return largest * num_chosen * _NUM_TOKENS
