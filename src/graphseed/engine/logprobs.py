"""Log-probabilities of tokens, for requests that ask for them.

They are those of the model: the log-softmax of the raw logits, before biases, penalties, masks,
filters and temperature, as OpenAI reports them. Owns what is read of the device and how it becomes
numbers. Does not know how the token was chosen.
"""

# S rows, V vocabulary, N most likely tokens

import math
from collections.abc import Sequence

import torch

from graphseed.engine.candidates import fixed_point_bits, rank, to_fixed


def columns(logits: torch.Tensor, best: torch.Tensor, num: int) -> list[torch.Tensor]:
    """What `top_of` and `logprob_of` read: the sum of weights [S, 1], N logits, N ids.

    `logits` is [S, V] float32, `best` [S, 1] its largest.
    """
    bits = fixed_point_bits(logits.shape[1])
    weights = to_fixed((logits.double() - best.double()).exp_(), bits)
    values, ids = rank(logits, num)
    return [weights.sum(1, keepdim=True), values, ids]


def logprob_of(logit: float, best: float, sum_of_weights: float, vocab_size: int) -> float:
    """The log-probability of a token, of its raw logit. On the host: one `log` for every device."""
    total = math.ldexp(sum_of_weights, -fixed_point_bits(vocab_size))
    return logit - best - math.log(total)


def top_of(
    values: Sequence[float], ids: Sequence[float], best: float, sum_of_weights: float, vocab: int
) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and log-probability, best first; tokens of no probability are left out."""
    return tuple(
        (int(token), logprob_of(value, best, sum_of_weights, vocab))
        for value, token in zip(values, ids, strict=True)
        if value > -math.inf
    )
