"""Reading a body's fields: whatever a client sends has an answer."""

import json
from typing import Any

import pytest

from graphseed.engine.request import TokenIds
from graphseed.server.errors import ApiError
from graphseed.server.wire.fields import json_object, shown
from graphseed.server.wire.params import parse
from tests.server.small import small_server


def test_a_value_of_many_levels_can_be_named_in_an_error() -> None:
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list of many levels"


@pytest.mark.parametrize("field", ["stop", "logit_bias", "temperature"])
def test_a_body_of_many_levels_is_the_clients_error(field: str) -> None:
    deep: object = []
    for _ in range(950):
        deep = [deep]
    with small_server() as server, pytest.raises(ApiError) as caught:
        parse(server.state, {field: deep})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "more", [{}, {"stop": ["a"]}, {"ids": [1, 2]}, {"logit_bias": [[1, -2.0]]}]
)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("ids", [[0, 99, 7], [5], []])
def test_a_prompt_of_known_ids_is_checked_as_it_is_parsed(
    ids: list[int], more: dict[str, Any], is_first: bool
) -> None:
    asked = {"prompt": ids, **more} if is_first else {**more, "prompt": ids}
    body = json_object(json.dumps(asked).encode(), vocab_size=100)
    prompt = body.pop("prompt")
    assert type(prompt) is TokenIds and list(prompt) == ids and prompt.below == 100
    assert repr(body) == repr(more)


def test_the_only_list_may_be_another_fields() -> None:
    asked = {"prompt": "a", "ids": [1, 2], "a": {"b": 1}, "c": 1.0, "d": True, "e": None, "f": 2}
    body = json_object(json.dumps(asked).encode(), vocab_size=100)
    assert repr(body) == repr(asked)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 100], [-1], [1.0], [True], [None], ["1"], [[1, 2]], [1, "a"], "text", "", 3, None,
        {"prompt_string": "a"}, [(1 << 80) + 1], [1.5e300],
    ],
)  # fmt: skip
def test_any_other_prompt_comes_as_it_is(prompt: object) -> None:
    body = json_object(json.dumps({"prompt": prompt, "n": 2}).encode(), vocab_size=100)
    assert repr(body) in (f"{{'prompt': {prompt!r}, 'n': 2}}", f"{{'n': 2, 'prompt': {prompt!r}}}")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_in_other_encodings_is_read(encoding: str) -> None:
    raw = json.dumps({"prompt": [1, 2], "text": "\U0001f600"}).encode(encoding)
    for body in (json_object(raw), json_object(raw, vocab_size=100)):
        assert list(body["prompt"]) == [1, 2] and body["text"] == "\U0001f600"


@pytest.mark.parametrize("vocab_size", [None, 100])
@pytest.mark.parametrize(
    ("raw", "status", "told"),
    [
        (b'{"prompt": [01]}', 500, "no JSON"),
        (b'{"prompt": [1,]}', 500, "no JSON"),
        (b'{"prompt": [1]} 2', 500, "no JSON"),
        (b'{"prompt": [1]', 500, "no JSON"),
        (b'{"prompt": "\xff"}', 500, "no JSON"),
        (b"", 500, "no JSON"),
        (b"[1, 2]", 400, "expected a JSON object"),
        (b'{"prompt": "\\ud800"}', 400, "surrogate"),
        (b'{"prompt": ' + b"[" * 200_000, 400, "nested too deeply"),
    ],
)
def test_what_is_no_object_is_refused(
    raw: bytes, status: int, told: str, vocab_size: int | None
) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        json_object(raw, vocab_size=vocab_size)
    assert caught.value.status == status
