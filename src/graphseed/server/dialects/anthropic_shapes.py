"""Anthropic's Messages API: its object, and the events of its streams, told from one answer.

Owns the shapes. Does not run anything.
"""

import json
import uuid
from collections.abc import Iterator
from typing import Any, Final

from graphseed.server.conversation.messages import Call
from graphseed.server.conversation.reading import Kind, Part
from graphseed.server.conversation.turn import Answer, Step
from graphseed.server.errors import ApiError
from graphseed.server.state import ServerState
from graphseed.server.wire.sse import named

# Their words for kinds of errors, where they are others.
_KINDS: Final = {
    "server_error": "api_error",
    "unavailable_error": "overloaded_error",
    "exceed_context_size_error": "invalid_request_error",
}
_BLOCKS: Final[dict[Kind, tuple[str, str]]] = {  # kind of block, and where its text is
    Kind.THOUGHT: ("thinking", "thinking"),
    Kind.TEXT: ("text", "text"),
}


class MessageObject:
    """One message."""

    def __init__(self, state: ServerState, answer: Answer) -> None:
        self._state = state
        self._answer = answer
        self._id = f"msg_{uuid.uuid4().hex}"

    def begun(self) -> dict[str, Any]:
        """The message before there is anything of it."""
        return self._made([], None, None)

    def whole(self) -> dict[str, Any]:
        """The message when all is read."""
        answer = self._answer
        blocks: list[dict[str, Any]] = []
        if answer.thought:
            # A signature proves whose thought it is; there is nobody here to prove it to.
            blocks.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
        if answer.text or not (answer.calls or answer.thought):
            blocks.append({"type": "text", "text": answer.text})
        blocks += [call_block(call) for call in answer.calls]
        return self._made(blocks, self.stop_reason, self.stop_sequence)

    @property
    def stop_reason(self) -> str:
        """Their word for why it ended."""
        match self._answer.telling.stop_type:
            case "limit":
                return "max_tokens"
            case "word":
                return "stop_sequence"
            case _:
                return "tool_use" if self._answer.calls else "end_turn"

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that was found."""
        return self._answer.telling.generation.request.stopping_word

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far; those of the prompt that were cached are not among the input's."""
        telling = self._answer.telling
        request = telling.generation.request
        return {
            "cache_read_input_tokens": request.num_cached,
            "input_tokens": len(request.prompt_ids) - request.num_cached,
            "output_tokens": len(telling.token_ids),
        }

    def _made(
        self, blocks: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self._state.name,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self.usage,
        }


class MessageStream:
    """The events of one message, in order."""

    def __init__(self, message: MessageObject) -> None:
        self._message = message
        self._has_begun = False
        self._index = -1  # of the block that was begun last
        self._open: Kind | None = None  # what the block that has not ended is

    def frames(self, step: Step) -> Iterator[str]:
        """What a step is told as."""
        if not self._has_begun:
            self._has_begun = True
            yield _event("message_start", message=self._message.begun())
        for part in step.parts:
            yield from self._part(part)
        if step.piece is None:
            yield from self._end()

    def error(self, error: ApiError) -> str:
        """What went wrong within the stream."""
        return named("error", error_body(error))

    def _part(self, part: Part) -> Iterator[str]:
        if part.call is not None:
            yield from self._close()
            block = call_block(part.call)
            written = json.dumps(block["input"], ensure_ascii=False)
            yield self._begin(block | {"input": {}})
            yield self._delta("input_json_delta", partial_json=written)
            yield self._stop()
            return
        block_type, name = _BLOCKS[part.kind]
        if self._open is not part.kind:
            yield from self._close()
            self._open = part.kind
            yield self._begin({"type": block_type, name: ""})
        yield self._delta(f"{block_type}_delta", **{name: part.text})

    def _close(self) -> Iterator[str]:
        if self._open is None:
            return
        if self._open is Kind.THOUGHT:
            yield self._delta("signature_delta", signature="")
        self._open = None
        yield self._stop()

    def _end(self) -> Iterator[str]:
        yield from self._close()
        if self._index < 0:  # an empty answer is a text too
            yield self._begin({"type": "text", "text": ""})
            yield self._stop()
        message = self._message
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield _event("message_delta", delta=delta, usage=message.usage)
        yield _event("message_stop")

    def _begin(self, block: dict[str, Any]) -> str:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **data: Any) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **data})

    def _stop(self) -> str:
        return _event("content_block_stop", index=self._index)


def call_block(call: Call) -> dict[str, Any]:
    """A call as a block; their input is always an object."""
    arguments = call.arguments if isinstance(call.arguments, dict) else {"value": call.arguments}
    tool_id = f"toolu_{call.id.removeprefix('call_')}"
    return {"type": "tool_use", "id": tool_id, "name": call.name, "input": arguments}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as their clients read it, and llama-server's too."""
    kind = _KINDS.get(error.kind, error.kind)
    return {"type": "error", "error": error.body["error"] | {"type": kind}}


def _event(name: str, **data: Any) -> str:
    return named(name, {"type": name, **data})
