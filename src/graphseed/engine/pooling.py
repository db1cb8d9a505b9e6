"""From hidden states to one request's embedding, or to its score.

Owns Embedding, which gathers over the chunks of one prompt. Works on the device, outside
graphs, and reads real rows alone. Does not normalise: whoever asked does.
"""

# T rows of a part, H hidden size

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from graphseed.engine.answer import Delta, finish
from graphseed.engine.request import Pooling, Request


@dataclass(slots=True)
class Embedding:
    """Takes the hidden states of one request. Owned by the engine; its thread only."""

    request: Request
    scores: Callable[[torch.Tensor], torch.Tensor]  # the model's head, for requests that it scores
    _rows: list[torch.Tensor] = field(default_factory=list)  # pooled so far, on the device

    def begin(self) -> None:
        """Forget what was gathered: the first chunk comes, again where the prompt was preempted."""
        self._rows = []

    def take(self, hidden: torch.Tensor, is_last: bool) -> Delta | None:
        """Take one chunk's rows [T, H] float32; the last chunk brings the result."""
        match self.request.pooling:
            case Pooling.MEAN:
                total = hidden.sum(dim=0, keepdim=True, dtype=torch.float64)
                self._rows = [total + self._rows[0] if self._rows else total]
            case Pooling.CLS:
                self._rows = self._rows or [hidden[:1].clone()]
            case Pooling.LAST:
                self._rows = [hidden[-1:].clone()]
            case _:
                self._rows.append(hidden.clone())
        if not is_last:
            return None
        rows = torch.cat(self._rows)
        if self.request.pooling is Pooling.MEAN:
            rows = rows / len(self.request.prompt_ids)
        if self.request.is_scored:
            self.request.score = self.scores(rows).item()
        else:
            self.request.embedding = tuple(tuple(row) for row in rows.float().tolist())
        finish(self.request)
        return Delta(self.request, is_last=True)
