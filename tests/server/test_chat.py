"""Chat completions as OpenAI's and llama-server's clients know them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from graphseed.engine import SamplingParams, Status
from graphseed.server.settings import ServerSettings
from tests.server.small import DEFAULTS, Small, leave_when, listening, small_server

PATH = "/v1/chat/completions"
HELLO = [{"role": "system", "content": "Book"}, {"role": "user", "content": "Hey"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"sky": {"enum": ["blue", "grey"]}, "hot": {"type": "boolean"}},
            "required": ["sky", "hot"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Small]:
    with small_server(context_len=1024, num_parallel=4) as small:
        yield small


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    message = choice["message"]
    assert isinstance(message, dict)
    return message


def joined(events: list[Any]) -> str:
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("path", [PATH, "/chat/completions"])
def test_an_answer_has_openais_shape(server: Small, path: str) -> None:
    answer = server.post(path, messages=HELLO, max_tokens=8)
    assert answer["object"] == "chat.completion"
    assert "cmpl" in answer["id"]
    assert answer["system_fingerprint"].startswith("b")
    assert answer["model"] == "tiny.gguf"
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert answer["timings"]["predicted_n"] == 8
    assert "__verbose" not in answer


def test_an_answer_is_that_of_its_prompt(server: Small) -> None:
    chat = server.post(PATH, messages=HELLO, max_tokens=8, verbose=True)
    prompt = server.post("/apply-template", messages=HELLO)["prompt"]
    plain = server.post("/completion", prompt=prompt, n_predict=8)
    assert message_of(chat)["content"] == plain["content"]
    assert chat["__verbose"]["prompt"] == prompt
    assert chat["usage"]["prompt_tokens"] == plain["tokens_evaluated"]


def test_a_stream_is_the_answer_in_pieces(server: Small) -> None:
    whole = server.post(PATH, messages=HELLO, max_tokens=12)
    *events, done = server.events(PATH, messages=HELLO, max_tokens=12)
    assert done == "[DONE]"
    first, *middle, last = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert {event["id"] for event in events} == {first["id"]}
    assert all(set(event["choices"][0]["delta"]) == {"content"} for event in middle)
    assert all(event["choices"][0]["delta"]["content"] for event in middle)
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert last["choices"][0] == {"finish_reason": "length", "index": 0, "delta": {}}
    assert last["timings"]["predicted_n"] == 12
    assert joined(events) == message_of(whole)["content"]


def test_usage_is_told_in_a_chunk_of_its_own_where_asked_for(server: Small) -> None:
    *events, done = server.events(
        PATH, messages=HELLO, max_tokens=5, stream_options={"include_usage": True},
        timings_per_token=True,
    )  # fmt: skip
    usage = events[-1]
    assert done == "[DONE]" and usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5 and usage["timings"]["predicted_n"] == 5
    assert "timings" not in events[0] and "timings" not in events[-2]
    assert all("timings" in event for event in events[1:-2])


def test_several_choices_differ_and_are_told_apart(server: Small) -> None:
    answer = server.post(PATH, messages=HELLO, max_tokens=8, n=3, temperature=1.5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 24
    *events, _ = server.events(PATH, messages=HELLO, max_tokens=8, n=3, temperature=1.5)
    for index, text in enumerate(texts):
        own = [event for event in events if event["choices"][0]["index"] == index]
        assert own[0]["choices"][0]["delta"]["role"] == "assistant"
        assert joined(own) == text


def test_several_choices_may_wait_for_one_slot(server: Small) -> None:
    answer = server.post(PATH, messages=HELLO, max_tokens=4, n=2, id_slot=0)
    assert len(answer["choices"]) == 2


def test_logprobs_go_with_the_text(server: Small) -> None:
    asked: dict[str, Any] = {
        "messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 3, "temperature": 0,
    }  # fmt: skip
    (choice,) = server.post(PATH, **asked)["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 5 and all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert all(entry["logprob"] <= 0 and entry["bytes"] for entry in entries)
    *events, _ = server.events(PATH, **asked)
    streamed = [
        entry
        for event in events
        for entry in (event["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert streamed == entries
    for event in events[1:-1]:
        assert event["choices"][0]["logprobs"]["content"], "text without what is known of it"


def test_progress_of_the_prompt_is_told_where_asked_for(server: Small) -> None:
    messages = [{"role": "user", "content": "This is a test" * 10}]
    *events, _ = server.events(
        PATH, messages=messages, max_tokens=2, return_progress=True, cache_prompt=False
    )
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert told[0]["processed"] == told[0]["cache"] == 0
    assert told[-1]["processed"] == told[-1]["total"] > 150
    processed = [one["processed"] for one in told]
    assert processed == sorted(set(processed)) and len(told) > 3


@pytest.mark.parametrize(
    ("asked", "is_right"),
    [
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, '"42"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}},
            "7",
        ),
        ({"response_format": {"type": "json_schema", "schema": {"const": 7}}}, "7"),
        ({"json_schema": {"const": "x"}}, '"x"'),
        ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
    ],
)
def test_an_answer_follows_its_schema_or_grammar(
    server: Small, asked: dict[str, Any], is_right: str
) -> None:
    answer = server.post(PATH, messages=HELLO, max_tokens=30, **asked)
    assert message_of(answer)["content"] == is_right
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert joined(server.events(PATH, messages=HELLO, max_tokens=30, **asked)[:-1]) == is_right


def test_a_json_object_is_one(server: Small) -> None:
    answer = server.post(
        PATH, messages=HELLO, max_tokens=10, response_format={"type": "json_object"}
    )
    assert message_of(answer)["content"].startswith("{")


@pytest.mark.parametrize(
    "messages",
    [
        None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}],
        [{"role": "user", "content": "t"}, *[{"role": "assistant", "content": "t"}] * 2],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"text": "no type"}]}],
        [{"role": "assistant", "tool_calls": [{"function": 3}]}],
    ],
)  # fmt: skip
def test_bad_messages_are_refused(server: Small, messages: Any) -> None:
    error = server.refused(PATH, 400, messages=messages)
    assert error["type"] == "invalid_request_error"
    assert "messages" in error["message"]


@pytest.mark.parametrize(
    ("status", "message", "asked"),
    [
        (400, "response_format.type", {"response_format": {"type": "sound"}}),
        (400, "schema", {"response_format": {"type": "json_object", "schema": 123}}),
        (400, "hiccup", {"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}),
        (400, "failed to parse grammar", {"grammar": "root ::= this is (not valid GBNF"}),
        (400, "tool_choice", {"tool_choice": "required"}),
        (400, "tool_choice", {"tools": [TIME], "tool_choice": "sometimes"}),
        (
            400, "tool_choice",
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        ),
        (400, "tools[0].function", {"tools": [{"type": "function"}]}),
        (400, "Cannot use custom grammar", {"tools": [TIME], "grammar": 'root ::= "a"'}),
        (400, "continue_final_message", {"continue_final_message": True}),
        (400, "chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
        (400, "enable_thinking", {"chat_template_kwargs": {"enable_thinking": "no"}}),
        (400, "reasoning_format", {"reasoning_format": "loud"}),
        (400, "n is", {"n": 0}),
        (501, "tools[0].type", {"tools": [{"type": "web_search"}]}),
        (501, "web_search_options", {"web_search_options": {}}),
        (501, "modalities", {"modalities": ["text", "audio"]}),
        (501, "reasoning_format", {"reasoning_format": "deepseek-legacy"}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    server: Small, status: int, message: str, asked: dict[str, Any]
) -> None:
    assert message in server.refused(PATH, status, messages=HELLO, **asked)["message"]
    assert message in server.refused(PATH, status, messages=HELLO, stream=True, **asked)["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio"])
def test_images_and_sound_are_not_supported(server: Small, kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": kind, kind: {"url": "data:,"}}]}]
    error = server.refused(PATH, 501, messages=messages)
    assert error["type"] == "not_supported_error" and kind in error["message"]


def test_parts_of_a_message_are_lines_of_it(server: Small) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "it"}]
    in_parts = server.post("/apply-template", messages=[{"role": "user", "content": parts}])
    in_one = server.post("/apply-template", messages=[{"role": "user", "content": "What is\nit"}])
    assert in_parts == in_one


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_conversation_that_is_too_long_is_told_by_its_length(
    server: Small, is_streaming: bool
) -> None:
    error = server.refused(PATH, 400, messages=HELLO * 100, stream=is_streaming)
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > 1024 and error["n_ctx"] == 1024


@pytest.mark.parametrize("path", ["/chat/completions/input_tokens", f"{PATH}/input_tokens"])
def test_tokens_are_counted_as_they_are_used(server: Small, path: str) -> None:
    counted = server.post(path, messages=HELLO)
    used = server.post(PATH, messages=HELLO, max_tokens=1)["usage"]["prompt_tokens"]
    assert counted == {"input_tokens": used, "object": "response.input_tokens"}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_is_required_is_made(server: Small, choice: Any) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {
            "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 200,
            "seed": seed,
        }  # fmt: skip
        answer = server.post(PATH, **asked)
        (call,) = message_of(answer)["tool_calls"]
        assert message_of(answer)["content"] is None
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert call["type"] == "function" and call["id"]
        assert call["function"]["name"] == "weather"
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["sky"] in ("blue", "grey") and isinstance(arguments["hot"], bool)
        *events, _ = server.events(PATH, **asked)
        told = [d for e in events if "tool_calls" in (d := e["choices"][0]["delta"])]
        assert [one["tool_calls"][0]["function"] for one in told] == [call["function"]]
        assert told[0]["tool_calls"][0]["index"] == 0 and joined(events) == ""
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_of_several_tools_is_called(server: Small) -> None:
    called = set()
    for seed in range(12):
        answer = server.post(
            PATH, messages=HELLO, tools=[WEATHER, TIME], tool_choice="required", max_tokens=200,
            seed=seed, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0,
        )  # fmt: skip
        (call,) = message_of(answer)["tool_calls"]
        called.add(call["function"]["name"])
    assert called == {"weather", "time"}


def test_a_tool_may_be_called_beside_a_schema(server: Small) -> None:
    seen = set()
    for seed in range(12):
        answer = server.post(
            PATH, messages=HELLO, tools=[TIME], json_schema={"const": "no"}, max_tokens=200,
            seed=seed, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0,
        )  # fmt: skip
        message = message_of(answer)
        seen.add("tool_calls" in message)
        assert "tool_calls" in message or message["content"] == '"no"'
    assert seen == {True, False}


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_tools_that_are_offered_need_not_be_called(server: Small, choice: Any) -> None:
    answer = server.post(PATH, messages=HELLO, tools=[WEATHER], tool_choice=choice, max_tokens=8)
    message = message_of(answer)
    assert "tool_calls" not in message and isinstance(message["content"], str)


def test_tools_need_jinja() -> None:
    with small_server(ServerSettings(uses_jinja=False, num_predict=2), context_len=512) as server:
        error = server.refused(PATH, 400, messages=HELLO, tools=[WEATHER])
        assert "--jinja" in error["message"]
        server.post(PATH, messages=HELLO, tools=[])


def test_thoughts_are_told_apart_from_the_answer(server: Small) -> None:
    asked: dict[str, Any] = {
        "messages": HELLO, "max_tokens": 60, "grammar": 'root ::= "<think>hm</think>\\n\\nyes"',
    }  # fmt: skip
    message = message_of(server.post(PATH, **asked))
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    *events, _ = server.events(PATH, **asked)
    thought = [e["choices"][0]["delta"].get("reasoning_content") or "" for e in events]
    assert "".join(thought) == "hm" and joined(events) == "yes"
    raw = message_of(server.post(PATH, **asked, reasoning_format="none"))
    assert raw["content"] == "<think>hm</think>\n\nyes" and "reasoning_content" not in raw


def test_an_assistants_message_at_the_end_is_continued(server: Small) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Whill"}]
    prompt = server.post("/apply-template", messages=HELLO)["prompt"] + "Whill"
    assert server.post("/apply-template", messages=begun)["prompt"] == prompt
    explicit = server.post(
        "/apply-template", messages=begun, continue_final_message=True,
        add_generation_prompt=False,
    )  # fmt: skip
    assert explicit["prompt"] == prompt
    whole = server.post("/apply-template", messages=begun, continue_final_message=False)["prompt"]
    assert "Whill<|im_end|>" in whole and whole.endswith("<|im_start|>assistant\n")
    error = server.refused(
        PATH, 400, messages=begun, add_generation_prompt=True, continue_final_message=True
    )
    assert "both true" in error["message"]


def test_vertex_ais_instances_are_answered_each(server: Small) -> None:
    instances = [
        {
            "@requestFormat": "chatCompletions",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": word}],
        }
        for word in ("Say hello", "Say world")
    ]
    answers = server.post("/predict", instances=instances)["predictions"]
    for instance, answer in zip(instances, answers, strict=True):
        alone = server.post(PATH, **instance)
        assert message_of(answer) == message_of(alone)
    server.refused("/predict", 400, instances=[])
    server.refused("/predict", 501, instances=[{"@requestFormat": "rawPredict"}])


def test_the_default_length_and_sampling_are_the_servers(server: Small) -> None:
    assert server.post(PATH, messages=HELLO)["usage"]["completion_tokens"] == 8
    settings = ServerSettings(num_predict=3, defaults=SamplingParams(seed=1))
    with small_server(settings, context_len=512) as other:
        first, again = (other.post(PATH, messages=HELLO) for _ in range(2))
        assert first["usage"]["completion_tokens"] == 3
        assert message_of(first) == message_of(again)
    assert DEFAULTS.temperature == 0.8


def test_openai_fields_that_mean_nothing_here_are_ignored(server: Small) -> None:
    server.post(
        PATH, messages=HELLO, max_completion_tokens=2, store=True, user="u", service_tier="auto",
        metadata={"a": "b"}, prompt_cache_key="k", safety_identifier=None, logit_bias=None,
    )  # fmt: skip


def test_a_thought_cannot_be_ended_from_outside(server: Small) -> None:
    server.refused(f"{PATH}/control", 501, action="reasoning_end")


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_leaves_frees_its_slot(is_streaming: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 3900, "ignore_eos": True, "stream": is_streaming}
    with small_server(context_len=4096) as server, listening(server.app) as address:
        num_free = server.core.num_free_blocks
        leave_when(address + PATH, body, lambda: server.core.scheduler.num_running > 0)
        server.wait_until_idle(2.0)
        assert server.core.num_free_blocks == num_free
        task = server.ledger.last_of_slot(0) or server.ledger.last_of_slot(1)
        assert task is not None and task.request.status is Status.FAILED, "it ran to its end"
