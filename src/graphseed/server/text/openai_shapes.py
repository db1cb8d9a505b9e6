"""OpenAI's objects for text completions, told from the same Telling as llama-server's.

Owns the shapes of /v1/completions. Does not run anything.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from graphseed.server.generation import Piece
from graphseed.server.state import ServerState
from graphseed.server.wire.llama_shapes import Telling, final_object, fingerprint, usage
from graphseed.server.wire.probs import openai_logprobs


class TextCompletion:
    """The objects of one HTTP request, which share an id and a time."""

    def __init__(self, state: ServerState) -> None:
        self._head = {
            "created": int(time.time()),
            "model": state.name,
            "system_fingerprint": fingerprint(state),
            "object": "text_completion",
            "id": f"cmpl-{uuid.uuid4().hex}",
        }

    def chunk(
        self, telling: Telling, piece: Piece, entry: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """A chunk of a stream, for a piece that `telling` has taken."""
        offset = len(telling.text) - len(piece.text)
        logprobs = None if entry is None else openai_logprobs([dict(entry)], offset)
        choice = _choice(telling, piece.text, logprobs, None)
        return {"choices": [choice], **self._head} | telling.more_of_chunk(piece)

    def last_chunk(self, telling: Telling) -> dict[str, Any]:
        """The chunk that ends one choice, with its usage and timings, as llama-server has it."""
        choice = _choice(telling, "", None, _finish_reason(telling))
        return {
            "choices": [choice], **self._head,
            "usage": usage([telling]), "timings": telling.timings, **_verbose(telling, True),
        }  # fmt: skip

    def usage_chunk(self, tellings: Sequence[Telling]) -> dict[str, Any]:
        """The chunk that tells the whole request's usage (stream_options.include_usage)."""
        return {"choices": [], **self._head, "usage": usage(tellings)}

    def whole(self, tellings: Sequence[Telling]) -> dict[str, Any]:
        """The answer that is not streamed. `timings` are the first choice's."""
        choices = [
            _choice(
                telling,
                telling.text,
                openai_logprobs(telling.entries) if telling.asked.has_logprobs else None,
                _finish_reason(telling),
            )
            for telling in tellings
        ]
        return {
            "choices": choices, **self._head, "usage": usage(tellings),
            "timings": tellings[0].timings, **_verbose(tellings[0], False),
        }  # fmt: skip


def _choice(
    telling: Telling, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {
        "text": text,
        "index": telling.index,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def _finish_reason(telling: Telling) -> str:
    return "length" if telling.is_cut else "stop"


def _verbose(telling: Telling, is_streaming: bool) -> dict[str, Any]:
    if not telling.asked.is_verbose:
        return {}
    return {"__verbose": final_object(telling, is_streaming=is_streaming)}
