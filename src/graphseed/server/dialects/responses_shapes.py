"""OpenAI's Responses API: its object, and the events of its streams, told from one answer.

Owns the shapes. A response that a limit ended has the status `incomplete`; its stream ends with
`response.completed` all the same, as llama-server's does, which clients wait for. Does not run
anything.
"""

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from graphseed.server.conversation.messages import Call
from graphseed.server.conversation.reading import Kind, Part
from graphseed.server.conversation.turn import Answer, Step
from graphseed.server.errors import ApiError
from graphseed.server.state import ServerState
from graphseed.server.wire.sse import named


class ResponseObject:
    """One response. Its items are in the order in which they come: thought, text, calls."""

    def __init__(self, state: ServerState, body: Mapping[str, Any], answer: Answer) -> None:
        self._state = state
        self._body = body
        self._answer = answer
        self._created_at = int(time.time())
        self._id = f"resp_{uuid.uuid4().hex}"

    def begun(self) -> dict[str, Any]:
        """The response before there is anything of it."""
        return self._made("in_progress", [], None)

    def whole(self, items: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The response when all is read; `items` where they were told already."""
        status = "incomplete" if self._answer.telling.is_cut else "completed"
        made = self._made(status, self._items() if items is None else items, self._usage())
        return made | {"timings": self._answer.telling.timings}

    def text_part(self, text: str) -> dict[str, Any]:
        """The one part of a message, with what is known of its tokens where that was asked for."""
        entries = self._answer.telling.entries if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}

    def message_item(self, item_id: str, text: str) -> dict[str, Any]:
        """A message that is complete."""
        content = [self.text_part(text)]
        return message_item(item_id) | {"status": "completed", "content": content}

    def _items(self) -> list[dict[str, Any]]:
        answer = self._answer
        items = []
        if answer.thought:
            items.append(thought_item(new_id("rs"), answer.thought))
        if answer.text or not answer.calls:
            items.append(self.message_item(new_id("msg"), answer.text))
        return items + [call_item(call) for call in answer.calls]

    def _usage(self) -> dict[str, Any]:
        telling = self._answer.telling
        request = telling.generation.request
        num_prompt, num_new = len(request.prompt_ids), len(telling.token_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": request.num_cached},
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted apart
            "total_tokens": num_prompt + num_new,
        }

    def _made(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        body, params = self._body, self._answer.telling.generation.request.params
        is_cut = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None if usage is None else int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "model": self._state.name,
            "output": output,
            "parallel_tool_calls": bool(body.get("parallel_tool_calls")),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | (body.get("reasoning") or {}),
            "store": False,
            "temperature": params.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": body.get("metadata") or {},
        }


class ResponseStream:
    """The events of one response, in order."""

    def __init__(self, response: ResponseObject, answer: Answer) -> None:
        self._response = response
        self._answer = answer
        self._number = 0
        self._done: list[dict[str, Any]] = []  # items
        self._open: Kind | None = None  # what the item that is not done yet is
        self._item_id = ""
        self._item_text = ""

    def frames(self, step: Step) -> Iterator[str]:
        """What a step is told as."""
        if self._number == 0:
            yield self._event("response.created", response=self._response.begun())
            yield self._event("response.in_progress", response=self._response.begun())
        more: dict[str, Any] = {}
        if step.piece is not None:
            more = self._answer.telling.more_of_chunk(step.piece)
            if step.piece.num_prompt_done is not None:
                yield self._event("response.in_progress", response=self._response.begun(), **more)
        for part in step.parts:
            if part.call is not None:
                yield from self._close()
                yield from self._call(part.call)
            else:
                yield from self._text(part, more)
        if step.piece is None:
            yield from self._end()

    def error(self, error: ApiError) -> str:
        """What went wrong within the stream."""
        return self._event("error", code=error.kind, message=error.message, param=None)

    def _text(self, part: Part, more: Mapping[str, Any]) -> Iterator[str]:
        if self._open is not part.kind:
            yield from self._close()
            yield from self._begin(part.kind)
        self._item_text += part.text
        if part.kind is Kind.THOUGHT:
            yield self._of_part("response.reasoning_text.delta", delta=part.text, **more)
        else:
            yield self._of_part("response.output_text.delta", delta=part.text, logprobs=[], **more)

    def _begin(self, kind: Kind) -> Iterator[str]:
        self._open, self._item_text = kind, ""
        is_thought = kind is Kind.THOUGHT
        self._item_id = new_id("rs" if is_thought else "msg")
        yield self._added(
            thought_item(self._item_id) if is_thought else message_item(self._item_id)
        )
        if not is_thought:
            yield self._of_part("response.content_part.added", part=self._response.text_part(""))

    def _close(self) -> Iterator[str]:
        if self._open is None:
            return
        text = self._item_text
        if self._open is Kind.THOUGHT:
            yield self._of_part("response.reasoning_text.done", text=text)
            item = thought_item(self._item_id, text)
        else:
            item = self._response.message_item(self._item_id, text)
            (part,) = item["content"]
            yield self._of_part("response.output_text.done", text=text, logprobs=part["logprobs"])
            yield self._of_part("response.content_part.done", part=part)
        self._open = None
        yield self._item_done(item)

    def _call(self, call: Call) -> Iterator[str]:
        item = call_item(call)
        where = {"item_id": item["id"], "output_index": len(self._done)}
        written = call.arguments_json
        yield self._added(item | {"arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", delta=written, **where)
        yield self._event(
            "response.function_call_arguments.done", arguments=written, name=call.name, **where
        )
        yield self._item_done(item)

    def _end(self) -> Iterator[str]:
        yield from self._close()
        if not self._done:  # an empty answer is a message too
            yield from self._begin(Kind.TEXT)
            yield from self._close()
        whole = self._response.whole(self._done)
        yield self._event("response.completed", response=whole, timings=whole["timings"])

    def _added(self, item: dict[str, Any]) -> str:
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _item_done(self, item: dict[str, Any]) -> str:
        frame = self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        return frame

    def _of_part(self, event_type: str, **more: Any) -> str:
        where = {"item_id": self._item_id, "output_index": len(self._done), "content_index": 0}
        return self._event(event_type, **where, **more)

    def _event(self, event_type: str, /, **data: Any) -> str:
        number, self._number = self._number, self._number + 1
        return named(event_type, {"type": event_type, "sequence_number": number, **data})


def new_id(kind: str) -> str:
    """An id of a kind of thing."""
    return f"{kind}_{uuid.uuid4().hex}"


def thought_item(item_id: str, text: str | None = None) -> dict[str, Any]:
    """A thought; without its text while it is in progress."""
    is_done = text is not None
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}] if is_done else [],
        "encrypted_content": None,
        "status": "completed" if is_done else "in_progress",
    }


def message_item(item_id: str) -> dict[str, Any]:
    """A message that is in progress."""
    return {
        "id": item_id, "type": "message", "role": "assistant", "status": "in_progress",
        "content": [],
    }  # fmt: skip


def call_item(call: Call) -> dict[str, Any]:
    """A call, complete."""
    return {
        "id": f"fc_{call.id.removeprefix('call_')}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments_json,
        "status": "completed",
    }
