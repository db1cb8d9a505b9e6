"""The JSON body of a request, and its fields by name and type.

Owns Fields, and how a body is read and parsed. What is absent or null has its default; a wrong type
is the client's error, which names the field and the value. Does not know any endpoint.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request

from graphseed.engine.request import TokenIds
from graphseed.server.errors import Failed, InvalidRequest

PROMPT: Final = "prompt"  # the field in which token ids may come, thousands at once

_MAX_SHOWN: Final = 80  # characters of a value that an error shows
_VALUE: Final = msgspec.json.Decoder[Any]()
_UNREAD: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])  # an object, its values as they came


class Fields:
    """A JSON object whose fields are asked for one by one. Unknown fields are nobody's concern."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.given = frozenset(name for name, value in body.items() if value is not None)

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def get(self, name: str) -> Any:
        """The value as it came; None where absent."""
        return self.body.get(name)

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(name, value, "a number")
        if not abs(value) < 1e300:  # nor NaN; a float may not hold an int
            raise wrong(name, value, "a finite number")
        return float(value)

    def whole(self, name: str, default: int) -> int:
        """A whole number; 8.0 is one."""
        value = self.body.get(name)
        if value is None:
            return default
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole:
            raise wrong(name, value, "a whole number")
        if abs(value) >= 1 << 63:
            raise wrong(name, value, "a whole number of at most 63 bits")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong(name, value, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; one string stands for a list of one."""
        value = self.body.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise wrong(name, value, "a string or a list of strings")
        return tuple(value)

    def inner(self, name: str) -> "Fields":
        """The fields of an object within; none where it is absent."""
        value = self.body.get(name)
        if value is None:
            return Fields({})
        if not isinstance(value, dict):
            raise wrong(name, value, "an object")
        return Fields(value)


def wrong(name: str, value: object, expected: str) -> InvalidRequest:
    """The error for a field that is not what it should be."""
    return InvalidRequest(f"{name} is {shown(value)}; expected {expected}")


def shown(value: object) -> str:
    """A value as JSON, cut to a length that an error can show."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} of many levels"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


async def json_body(request: Request) -> dict[str, Any]:
    """Read a request's body, which must be a JSON object.

    Raises as `whole_body` and `json_object`.
    """
    return json_object(await whole_body(request))


async def whole_body(request: Request) -> bytes:
    """Read a request's body. Raises ClientDisconnect.

    It is kept nowhere: a second call waits until the client is gone.
    """
    message = await request.receive()
    parts = [message]
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await request.receive()
        parts.append(message)
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return b"".join(part.get("body", b"") for part in parts)


def json_object(raw: bytes, *, vocab_size: int | None = None) -> dict[str, Any]:
    """The JSON object that a body is. Raises InvalidRequest and Failed.

    With `vocab_size`, a prompt that is a list of ids below it comes as a TokenIds, checked while it
    is parsed (as a list, where msgspec does not take the body); any other prompt comes as it is.
    What is no JSON at all is a server_error of status 500, as llama-server answers it.
    """
    try:
        body = _parsed(raw, vocab_size)
    except UnicodeEncodeError:
        raise InvalidRequest("the body has half a surrogate pair; expected Unicode text") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise Failed(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise wrong("the body", body, "a JSON object")
    return body


def _parsed(raw: bytes, vocab_size: int | None) -> Any:
    """The value of a JSON text: msgspec's parser, several times as fast, where it takes it.

    Raises UnicodeEncodeError for half a character, which can be written in JSON and is no text.
    """
    try:
        return _VALUE.decode(raw) if vocab_size is None else _with_ids(raw, vocab_size)
    # It does not take what json does: UTF-16, NaN, half a character (a UnicodeDecodeError, once).
    except (msgspec.MsgspecError, UnicodeDecodeError):
        body = json.loads(raw)
    json.dumps(body, ensure_ascii=False).encode()
    return body


def _with_ids(raw: bytes, vocab_size: int) -> Any:
    """A value, with ids as a TokenIds where it is an object with a prompt. Raises MsgspecError."""
    decoders = _decoders(vocab_size)
    if raw.count(b"[") == 1:  # ids alone, perhaps: all in one pass, which takes a third less
        try:
            body = decoders.object.decode(raw)
        except msgspec.ValidationError:  # no object, or its list is not of ids, whosever it is
            return _VALUE.decode(raw)
        for name, value in body.items():
            if type(value) is tuple:
                body[name] = TokenIds.known(value, vocab_size) if name == PROMPT else [*value]
        return body
    try:
        unread = _UNREAD.decode(raw)
    except msgspec.ValidationError:  # no object
        return _VALUE.decode(raw)
    body = {name: _VALUE.decode(value) for name, value in unread.items() if name != PROMPT}
    if PROMPT in unread:
        try:
            body[PROMPT] = TokenIds.known(decoders.ids.decode(unread[PROMPT]), vocab_size)
        except msgspec.ValidationError:  # a text, several prompts, or ids that no model has
            body[PROMPT] = _VALUE.decode(unread[PROMPT])
    return body


class _Decoders(NamedTuple):
    """Of one vocabulary."""

    ids: msgspec.json.Decoder[tuple[int, ...]]
    object: msgspec.json.Decoder[dict[str, Any]]  # every list in it is one of ids


@lru_cache(maxsize=8)  # a server has one model at a time
def _decoders(vocab_size: int) -> _Decoders:
    token_id = Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]
    ids = tuple[token_id, ...]
    value = ids | dict[str, Any] | str | float | int | bool | None
    return _Decoders(msgspec.json.Decoder(ids), msgspec.json.Decoder(dict[str, value]))
