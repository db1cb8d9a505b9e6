"""Log-probabilities and probabilities of tokens in the shapes that clients know.

Owns `Probabilities`, which writes llama-server's and OpenAI's objects, and the filters as they are
computed again on the host for `post_sampling_probs`. Log-probabilities are the model's, before
biases, penalties and filters, as the engine reports them. Does not choose tokens.
"""

# K candidates of one token, by falling log-probability

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from graphseed.engine import SamplingParams
from graphseed.engine.penalties import edits_of
from graphseed.models.model import Model
from graphseed.server.generation import Piece
from graphseed.server.text.tokens import Pieces
from graphseed.server.wire.params import Asked

Values = npt.NDArray[np.float64]


class Probabilities:
    """Writes what is known of the tokens of one answer. Takes its pieces in order."""

    def __init__(self, model: Model, prompt_ids: Sequence[int], asked: Asked) -> None:
        self._pieces = Pieces(model.tokenizer)
        self._vocab_size = model.vocab_size
        self._asked = asked
        self._token_ids = list(prompt_ids)  # and the answer's, which penalties look back on

    def entry(self, piece: Piece) -> dict[str, Any] | None:
        """llama-server's object for one token; None for a piece without one.

        With `top_logprobs`, as OpenAI's chat objects have them too, or with `top_probs` where
        probabilities after sampling were asked for.
        """
        token = piece.token_id
        if token is None or piece.logprob is None:
            return None
        if not self._asked.is_post_sampling:
            top = piece.top[: self._asked.num_top]
            self._token_ids.append(token)
            return {
                **self._named(token, "logprob", _finite(piece.logprob)),
                "top_logprobs": [self._named(i, "logprob", _finite(value)) for i, value in top],
            }
        kept = self._kept(piece)
        self._token_ids.append(token)
        own = next((value for i, value in kept if i == token), _SMALLEST)
        top = kept[: self._asked.num_top]
        return {
            **self._named(token, "prob", own),
            "top_probs": [self._named(i, "prob", value) for i, value in top],
        }

    def _named(self, token: int, name: str, value: float) -> dict[str, Any]:
        piece = self._pieces.of(token)
        text = piece.decode(errors="replace")
        return {"id": token, "token": text, "bytes": list(piece), name: value}

    def _kept(self, piece: Piece) -> tuple[tuple[int, float], ...]:
        """Token ids and probabilities after biases, penalties and filters; none is 0."""
        params = self._asked.params
        if params.is_greedy:
            return ((piece.token_id or 0, 1.0),)
        ids = np.array([i for i, _ in piece.top])
        values = np.array([value for _, value in piece.top])
        moved = edits_of(params, self._token_ids, self._vocab_size)
        if moved:
            offsets = {token: bias - reduction for token, bias, _, reduction in moved}
            values = values + np.array([offsets.get(int(i), 0.0) for i in ids])
            order = np.lexsort((ids, -values))
            ids, values = ids[order], values[order]
        odds = filtered(values, params)
        return tuple((int(i), float(p)) for i, p in zip(ids, odds, strict=True) if p > 0.0)


_SMALLEST = math.ulp(0.0)  # a token that was drawn has some probability, however it was rounded


def filtered(values: Values, params: SamplingParams) -> Values:
    """Probabilities [K] after the filters and the temperature, of log-probabilities [K]."""
    values = values.copy()
    if params.top_k:
        values[params.top_k :] = -np.inf
    if params.typical_p < 1.0:
        odds = _softmax(values)
        usual = np.where(odds > 0, odds * np.maximum(values - values[0], -1e3), 0.0).sum()
        order = np.argsort(np.abs(values - values[0] - usual), kind="stable")
        before = np.cumsum(odds[order]) - odds[order]
        values[order[before > params.typical_p]] = -np.inf
    if params.top_p < 1.0:
        odds = _softmax(values)
        values[np.cumsum(odds) - odds >= params.top_p] = -np.inf
    if params.min_p > 0.0:
        values[values < values.max() + math.log(params.min_p)] = -np.inf
    return _softmax(values / params.temperature)


def openai_logprobs(entries: Sequence[dict[str, Any]], offset: int = 0) -> dict[str, Any]:
    """The `logprobs` of a choice of /v1/completions: OpenAI's four lists, and llama-server's one.

    `offset` is where in the text the first token begins. Without `top_logprobs` in the entries
    (after sampling) the lists have what there is.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [_openai_name(entry) for entry in entries],
        "token_logprobs": [_logprob(entry) for entry in entries],
        "top_logprobs": [
            {_openai_name(top): _logprob(top) for top in _tops(entry)} for entry in entries
        ],
        "text_offset": offsets,
        "content": list(entries),
    }


def _tops(entry: dict[str, Any]) -> Sequence[dict[str, Any]]:
    tops: Sequence[dict[str, Any]] = entry.get("top_logprobs", entry.get("top_probs", ()))
    return tops


def _openai_name(entry: dict[str, Any]) -> str:
    """A token's text; of a part of a character the bytes, by which two of them differ."""
    piece = bytes(entry["bytes"])
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _logprob(entry: dict[str, Any]) -> float:
    return float(entry["logprob"]) if "logprob" in entry else math.log(entry["prob"])


def _finite(value: float) -> float:
    return max(value, -1e30)  # JSON has no infinity


def _softmax(values: Values) -> Values:
    odds = np.exp(values - values.max())
    return np.asarray(odds / odds.sum())
