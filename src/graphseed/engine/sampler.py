"""Choosing the next token.

Owns `sample`. A sample depends only on the request's seed, the position and the logits (I9): every
draw comes from a counter-based generator keyed by those, and nothing is kept between calls. Runs
outside prompt graphs.
"""

# V vocabulary, K candidates kept

import numpy as np
import numpy.typing as npt
import torch

from graphseed.engine.request import SamplingParams


def sample(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Choose the token that follows `position`, from its logits [V] float32 on any device.

    The order is llama.cpp's: top-k, top-p, min-p, then temperature. Waits for the device.
    """
    if params.temperature == 0.0:
        return int(torch.argmax(logits).item())
    values, token_ids = _candidates(logits, params.top_k)
    kept = _filter(values, params)
    weights = _softmax(values[:kept] / params.temperature)
    point = _uniform(params.seed, position) * float(weights.sum())
    index = int(np.searchsorted(np.cumsum(weights), point, side="right"))
    return int(token_ids[min(index, kept - 1)])


def _candidates(
    logits: torch.Tensor, top_k: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """The K best logits in falling order, and their ids; ties go to the lower id."""
    host = logits.float().cpu().numpy().astype(np.float64)
    order = np.argsort(-host, kind="stable")
    if top_k:
        order = order[:top_k]
    return host[order], order


def _filter(values: npt.NDArray[np.float64], params: SamplingParams) -> int:
    """How many of the falling candidates top-p and then min-p keep; at least one."""
    weights = _softmax(values)
    kept = len(values)
    if params.top_p < 1.0:
        kept = int(np.searchsorted(np.cumsum(weights), params.top_p, side="left")) + 1
        kept = min(kept, len(values))
    if params.min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(weights >= params.min_p * weights[0])))
    return max(kept, 1)


def _softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
