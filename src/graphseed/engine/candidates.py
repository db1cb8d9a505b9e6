"""Ranking tokens, weighing them, and what each filter keeps of them.

Owns the arithmetic of a draw. Every sum is one of whole numbers (a weight is e**x in fixed point),
so it is the same number in whatever order a kernel adds: a row's result cannot depend on how many
rows there are, on its place among them, or on how its memory is aligned. What is left is exact
(comparisons, sorting) or done element by element. A filter whose parameter is neutral for a row
keeps exactly what it was given, so one row's parameters cannot reach another's.
Does not know requests, and draws no random number.
"""

# S rows, V vocabulary, K candidates kept for each row (by falling logit, equal ones by rising id)

import torch

TOPK_LIMIT = 1024  # candidates up to which they are selected; for more the row is sorted
DROPPED = float("-inf")  # the value of a candidate that a filter dropped


def rank(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` best logits of each row [S, K] float64, and their token ids [S, K] int64.

    `logits` is [S, V] float32. The order is the only one: equal logits go by rising id.
    """
    vocab_size = logits.shape[1]
    clean = logits + 0.0  # -0.0 becomes 0.0: equal numbers must have equal bits
    if num < min(vocab_size, TOPK_LIMIT + 1):
        # torch.topk may return any of several equal values. No two of these keys are equal: in the
        # upper half the logit's bits in an order that integers compare, in the lower the id.
        bits = clean.view(torch.int32)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        falling = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
        ids = torch.topk(torch.add(falling, ordered, alpha=1 << 32), num).indices
    else:
        ids = torch.sort(clean, dim=1, descending=True, stable=True).indices[:, :num]
    return logits.gather(1, ids).double(), ids


def fixed_point_bits(vocab_size: int) -> int:
    """Fraction bits of a weight: as many as let the whole vocabulary's sum fit 63 bits."""
    return min(52, 62 - vocab_size.bit_length())


def to_fixed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Round float64 values, at most 1, to multiples of 2**-bits, as int64."""
    return values.mul(float(1 << bits)).round_().long()


def weigh(values: torch.Tensor, bits: int, temperature: torch.Tensor | None = None) -> torch.Tensor:
    """Weights [S, K] int64 in fixed point; the best candidate's is 1, that of a dropped one 0.

    `values` is [S, K] float64, `temperature` [S, 1] float64 above 0.
    """
    distance = values - values.amax(1, keepdim=True)
    if temperature is not None:
        distance = distance / temperature
    return to_fixed(distance.exp_(), bits)


def keep_top_k(values: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Drop all but the `top_k` [S, 1] best."""
    places = torch.arange(values.shape[1], dtype=torch.float64, device=values.device)
    return values.masked_fill(places >= top_k, DROPPED)


def keep_typical(values: torch.Tensor, typical_p: torch.Tensor, bits: int) -> torch.Tensor:
    """Keep the candidates of the most usual surprise that together reach `typical_p` [S, 1].

    Surprise is -log p; usual is near its mean, the entropy. 1 keeps all.
    """
    below = values.amax(1, keepdim=True) - values  # how much more surprising than the best
    odds = (-below).exp_()
    weights = to_fixed(odds, bits)
    # x * e**-x is below 0.37; what is further down than 1000 has no weight, and inf * 0 is none.
    moments = to_fixed(odds * below.clamp(max=1000.0), bits)
    total = weights.sum(1, keepdim=True).double()
    unusual = (below - moments.sum(1, keepdim=True).double() / total).abs_()
    order = torch.sort(unusual, dim=1, stable=True).indices
    ordered = weights.gather(1, order)
    before = ordered.cumsum(1) - ordered
    is_beyond = before.double() > typical_p * total  # never, when it is 1
    return values.masked_fill(is_beyond.scatter(1, order, is_beyond), DROPPED)


def keep_top_p(values: torch.Tensor, top_p: torch.Tensor, bits: int) -> torch.Tensor:
    """Keep the fewest best candidates that together reach `top_p` [S, 1]; 1 keeps all."""
    weights = weigh(values, bits)
    sums = weights.cumsum(1)
    before = (sums - weights).double()
    is_beyond = (before >= top_p * sums[:, -1:].double()) & (top_p < 1.0)
    return values.masked_fill(is_beyond, DROPPED)


def keep_min_p(values: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Keep what is at least min_p times as likely as the best; [S, 1], -inf keeps all."""
    return values.masked_fill(values < values.amax(1, keepdim=True) + log_min_p, DROPPED)


def pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The candidate [S, 1] that the point `uniform` [S, 1], in [0, 1), of the weights falls on.

    A candidate of no weight is not picked.
    """
    sums = weights.cumsum(1)
    # The product, as float64 rounds it, stays below the sum: `uniform` is at most 1 - 2**-53.
    point = (uniform * sums[:, -1:].double()).long()
    # Only a row of no weight at all is out of range; its result is not used.
    return torch.searchsorted(sums, point, right=True).clamp_(max=weights.shape[1] - 1)
