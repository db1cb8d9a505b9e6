"""OpenAI's objects for chat completions, told from the answers of a turn.

Owns the shapes of /v1/chat/completions, streamed and not. Does not run anything.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from graphseed.server.conversation.messages import Call
from graphseed.server.conversation.reading import Kind, Part
from graphseed.server.conversation.turn import Answer, Step, Turn
from graphseed.server.state import ServerState
from graphseed.server.wire.llama_shapes import Telling, final_object, fingerprint, usage


class ChatCompletion:
    """The objects of one HTTP request, which share an id and a time."""

    def __init__(self, state: ServerState) -> None:
        self._head = {
            "created": int(time.time()),
            "model": state.name,
            "system_fingerprint": fingerprint(state),
            "id": f"chatcmpl-{uuid.uuid4().hex}",
        }

    def whole(self, turn: Turn) -> dict[str, Any]:
        """The answer that is not streamed. `timings` are the first choice's."""
        tellings = turn.tellings
        return {
            "choices": [_choice(answer) for answer in turn.answers],
            **self._head,
            "object": "chat.completion",
            "usage": usage(tellings),
            "timings": tellings[0].timings,
            **_verbose(tellings[0], is_streaming=False),
        }

    def usage_chunk(self, turn: Turn) -> dict[str, Any]:
        """The chunk that tells the whole request's usage (stream_options.include_usage)."""
        tellings = turn.tellings
        return {**self.chunk([]), "usage": usage(tellings), "timings": tellings[0].timings}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream."""
        return {"choices": choices, **self._head, "object": "chat.completion.chunk"}


class ChoiceStream:
    """The chunks of one choice, in order. What is known of tokens goes out with the next text."""

    def __init__(self, shapes: ChatCompletion, answer: Answer) -> None:
        self._shapes = shapes
        self._telling = answer.telling
        self._answer = answer
        self._entries: list[dict[str, Any]] = []
        self._num_calls = 0
        self._has_begun = False

    def chunks(self, step: Step) -> Iterator[dict[str, Any]]:
        """What a step is told as."""
        if not self._has_begun:
            self._has_begun = True
            yield self._chunk({"role": "assistant", "content": None})
        if step.entry is not None:
            self._entries.append(step.entry)
        more: dict[str, Any] = {}
        if step.piece is not None:
            more = self._telling.more_of_chunk(step.piece)
            if step.piece.num_prompt_done is not None:
                yield self._chunk({}) | more
        for part in step.parts:
            yield self._chunk(self._delta(part), self._logprobs()) | more
        if step.piece is None:
            yield self._last()

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.call is not None:
            index, self._num_calls = self._num_calls, self._num_calls + 1
            return {"tool_calls": [{"index": index, **call_object(part.call)}]}
        name = "reasoning_content" if part.kind is Kind.THOUGHT else "content"
        return {name: part.text}

    def _last(self) -> dict[str, Any]:
        chunk = self._chunk({}, self._logprobs(), self._answer.finish_reason)
        if not self._telling.asked.includes_usage:
            chunk["timings"] = self._telling.timings
        return chunk | _verbose(self._telling, is_streaming=True)

    def _logprobs(self) -> dict[str, Any] | None:
        if not self._entries:
            return None
        entries, self._entries = self._entries, []
        return {"content": entries}

    def _chunk(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"finish_reason": finish_reason, "index": self._telling.index}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self._shapes.chunk([choice | {"delta": delta}])


def call_object(call: Call) -> dict[str, Any]:
    """A call as OpenAI's clients read it."""
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _choice(answer: Answer) -> dict[str, Any]:
    telling = answer.telling
    choice: dict[str, Any] = {
        "finish_reason": answer.finish_reason,
        "index": telling.index,
        "message": _message(answer.text, answer.thought, answer.calls),
    }
    if telling.asked.has_logprobs:
        choice["logprobs"] = {"content": telling.entries}
    return choice


def _message(text: str, thought: str, calls: Sequence[Call]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [call_object(call) for call in calls]
    return message


def _verbose(telling: Telling, *, is_streaming: bool) -> dict[str, Any]:
    if not telling.asked.is_verbose:
        return {}
    return {"__verbose": final_object(telling, is_streaming=is_streaming)}
