"""OpenAI's Responses API, told from the same answers as chat completions."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from graphseed.server.dialects.responses_input import chat_body
from tests.server.small import Small, small_server

PATH = "/v1/responses"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "system", "content": "Book"}, {"role": "user", "content": "Hey"}]
PARAMETERS = {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"]}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Small]:
    with small_server(context_len=1024, num_parallel=4) as small:
        yield small


def events_of(server: Small, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; their names must be their types, their numbers in order."""
    reply = server.client.post(PATH, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    events = []
    for number, frame in enumerate(reply.text.split("\n\n")[:-1]):
        name, _, data = frame.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        events.append(event)
    return events


def text_of(answer: dict[str, Any]) -> str:
    parts = [p for item in answer["output"] if item["type"] == "message" for p in item["content"]]
    return "".join(part["text"] for part in parts)


@pytest.mark.parametrize("path", [PATH, "/responses"])
def test_a_response_is_the_chats_answer(server: Small, path: str) -> None:
    answer = server.post(path, input=HELLO, max_output_tokens=8, model="any")
    chat = server.post(CHAT, messages=HELLO, max_tokens=8)
    assert answer["object"] == "response" and answer["id"].startswith("resp_")
    assert answer["output"][0]["id"].startswith("msg_")
    assert text_of(answer) == chat["choices"][0]["message"]["content"]
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == 8
    assert answer["error"] is None and answer["model"] == "tiny.gguf"


def test_a_stream_is_the_response_in_pieces(server: Small) -> None:
    events = events_of(server, input=HELLO, max_output_tokens=8)
    types = [event["type"] for event in events]
    assert types[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert types[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert set(types[4:-4]) == {"response.output_text.delta"}
    deltas = "".join(event["delta"] for event in events[4:-4])
    completed = events[-1]["response"]
    assert deltas == events[-4]["text"] == text_of(completed)
    assert deltas == text_of(server.post(PATH, input=HELLO, max_output_tokens=8))
    item_id = events[2]["item"]["id"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item_id}
    assert completed["output"][0]["id"] == item_id
    assert completed["id"] == events[0]["response"]["id"]
    assert completed["usage"]["output_tokens"] == 8 and events[-1]["timings"]["predicted_n"] == 8


def test_llama_servers_telemetry_is_told_where_asked_for(server: Small) -> None:
    events = events_of(
        server, input="This is a test" * 10, max_output_tokens=8, timings_per_token=True,
        return_progress=True,
    )  # fmt: skip
    progress = [event for event in events if "prompt_progress" in event]
    assert progress and {event["type"] for event in progress} == {"response.in_progress"}
    assert progress[-1]["prompt_progress"]["processed"] == progress[-1]["prompt_progress"]["total"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert deltas and all("prompt_per_second" in event["timings"] for event in deltas)


def test_a_text_and_instructions_are_a_conversation(server: Small) -> None:
    answer = server.post(PATH, input="Hey", instructions="Book", max_output_tokens=8)
    assert text_of(answer) == text_of(server.post(PATH, input=HELLO, max_output_tokens=8))


def test_a_schema_in_text_format_is_followed(server: Small) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"const": 7}, "strict": True}
    answer = server.post(PATH, input="Hey", text={"format": form})
    assert text_of(answer) == "7" and answer["status"] == "completed"
    assert answer["incomplete_details"] is None


def test_a_required_call_is_an_item(server: Small) -> None:
    asked: dict[str, Any] = {
        "input": "Hey", "tools": [WEATHER], "max_output_tokens": 200,
        "tool_choice": {"type": "function", "name": "weather"},
    }  # fmt: skip
    (item,) = server.post(PATH, **asked)["output"]
    assert item["type"] == "function_call" and item["name"] == "weather"
    assert item["call_id"].startswith("call_") and item["status"] == "completed"
    assert isinstance(json.loads(item["arguments"])["hot"], bool)
    events = events_of(server, **asked)
    by_type = {event["type"]: event for event in events}
    assert by_type["response.output_item.added"]["item"]["arguments"] == ""
    assert by_type["response.function_call_arguments.delta"]["delta"] == item["arguments"]
    assert by_type["response.function_call_arguments.done"]["arguments"] == item["arguments"]
    assert by_type["response.output_item.done"]["item"]["name"] == "weather"
    assert by_type["response.completed"]["response"]["output"][0]["type"] == "function_call"
    assert "response.output_text.delta" not in by_type


def test_a_thought_is_an_item_before_the_text(server: Small) -> None:
    asked: dict[str, Any] = {
        "input": "Hey", "grammar": 'root ::= "<think>hm</think>yes"', "max_output_tokens": 60,
    }  # fmt: skip
    thought, message = server.post(PATH, **asked)["output"]
    assert thought["type"] == "reasoning" and thought["content"][0]["text"] == "hm"
    assert message["content"][0]["text"] == "yes"
    events = events_of(server, **asked)
    added = [e for e in events if e["type"] == "response.output_item.added"]
    assert [e["item"]["type"] for e in added] == ["reasoning", "message"]
    assert [e["output_index"] for e in added] == [0, 1]
    assert (
        "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta") == "hm"
    )
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


def test_logprobs_are_told_where_included(server: Small) -> None:
    answer = server.post(
        PATH, input="Hey", max_output_tokens=4, top_logprobs=2,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    entries = answer["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 4 and all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_items_become_the_messages_of_a_chat() -> None:
    body = chat_body(
        {
            "instructions": "Be kind.",
            "input": [
                {"role": "developer", "content": "And brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "List."}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "pwd", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "a b"},
                {"type": "message", "role": "assistant",
                 "content": [{"type": "output_text", "text": "Two."}]},
                {"role": "assistant", "content": "Files."},
            ],
            "reasoning": {"effort": "none"},
            "max_output_tokens": 5,
            "top_k": 3,
        }
    )  # fmt: skip
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call_id, name in (("c1", "ls"), ("c2", "pwd"))
    ]
    assert body == {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": "And brief."},
            {"role": "user", "content": [{"type": "text", "text": "List."}]},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "a b"},
            {"role": "assistant", "content": [{"type": "text", "text": "Two."}]},
            {"role": "assistant", "content": "Files."},
        ],
        "reasoning_effort": "none",
        "max_tokens": 5,
        "top_k": 3,
    }


@pytest.mark.parametrize(
    ("status", "message", "body"),
    [
        (400, "input", {}),
        (400, "input", {"input": 3}),
        (400, "input[0]", {"input": ["text"]}),
        (400, "input[0].role", {"input": [{"content": "a"}]}),
        (400, "tools[0].function", {"input": "a", "tools": [{"type": "function"}]}),
        (400, "reasoning", {"input": "a", "reasoning": "high"}),
        (501, "previous_response_id", {"input": "a", "previous_response_id": "resp_1"}),
        (501, "background", {"input": "a", "background": True}),
        (501, "input[0].type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        (501, "input_image", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        (501, "tools[0].type", {"input": "a", "tools": [{"type": "web_search"}]}),
        (501, "n is 2", {"input": "a", "n": 2}),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    server: Small, status: int, message: str, body: dict[str, Any]
) -> None:
    assert message in server.refused(PATH, status, **body)["message"]


@pytest.mark.parametrize("path", ["/responses/input_tokens", f"{PATH}/input_tokens"])
def test_tokens_are_counted_as_they_are_used(server: Small, path: str) -> None:
    used = server.post(PATH, input=HELLO, max_output_tokens=1)["usage"]["input_tokens"]
    assert server.post(path, input=HELLO) == {
        "input_tokens": used, "object": "response.input_tokens",
    }  # fmt: skip


def test_an_empty_answer_is_a_message(server: Small) -> None:
    asked: dict[str, Any] = {"input": "Hey", "grammar": 'root ::= ""'}
    answer = server.post(PATH, **asked)
    assert text_of(answer) == "" and answer["status"] == "completed"
    events = events_of(server, **asked)
    assert events[-1]["response"]["output"][0]["type"] == "message"
