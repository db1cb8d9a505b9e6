"""Text into tokens and back, as llama-server does it; /tokenize and /detokenize.

Owns the shapes that a prompt may have on the wire, the rule for the beginning of sequence, and
`Pieces`, which knows the bytes of a single token. Does not know what becomes of a prompt.
"""

import asyncio
import copy
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphseed.engine import BadToken, EngineConfig, PromptTooLong
from graphseed.engine.request import TokenIds, whole_numbers
from graphseed.models.model import Model
from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.state import ServerState
from graphseed.server.wire.fields import Fields, json_body, wrong
from graphseed.server.wire.replies import documented, json_reply

BLOCKING_CHARACTERS: Final = 20_000  # longer texts are tokenised beside the event loop


async def encode(model: Model, text: str, *, adds_special: bool) -> Sequence[int]:
    """Token ids of a text in which special tokens may be written out.

    `adds_special` puts what the tokenizer wants around a whole text (a BOS, where it has one).
    """
    if len(text) < BLOCKING_CHARACTERS:
        return _encode(model.tokenizer, text, adds_special)
    return await asyncio.to_thread(_encode, model.tokenizer, text, adds_special)


def decode(model: Model, ids: Iterable[int]) -> str:
    """Text of token ids, special tokens written out."""
    text: str = model.tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


async def prompts_of(model: Model, config: EngineConfig, value: Any) -> list[Sequence[int]]:
    """The prompts of a `prompt` field: a text, token ids, both mixed, an object, or a list of them.

    A text, and a mixed list that begins with one, get what the tokenizer puts around a whole text;
    token ids are taken as they are. An empty text is a BOS, where the model has one. Raises
    InvalidRequest, PromptTooLong, and NotSupported for media; what can never run is not looked at
    one by one, which would take the event loop's time.
    """
    if value is None:
        raise InvalidRequest("prompt is missing; expected a text, token ids, or a list of prompts")
    if not isinstance(value, list) or not value or _is_one_prompt(value):
        return [await _prompt(model, value, config.context_len)]
    room = config.num_parallel + config.max_waiting
    if len(value) > room:
        raise InvalidRequest(
            f"the request has {len(value)} prompts; expected at most {room}, which is what this "
            "server lets run and wait"
        )
    return [await _prompt(model, item, config.context_len) for item in value]


class Pieces:
    """The text of single tokens. Made for one tokenizer; cheap to make."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kinds = set() if decoder is None else _kinds(json.loads(decoder.__getstate__()))
        self._byte_of = _byte_letters() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds

    def of(self, token_id: int) -> bytes:
        """The bytes of one token; they may be a part of a character. Empty for unknown ids."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        written: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if written is None:
            return b""
        if self._byte_of:
            # A letter outside the alphabet stands for itself.
            return b"".join(self._byte_of.get(letter, letter.encode()) for letter in written)
        if self._falls_back and len(written) == 6 and written.startswith("<0x"):
            return bytes([int(written[3:5], 16)])
        return written.replace("\u2581", " ").encode()


def router(state: ServerState) -> APIRouter:
    """/tokenize and /detokenize."""
    routes = APIRouter(tags=["tokens"])
    plain = _PlainText()

    @routes.post("/tokenize", **documented(TOKENIZE_BODY, TOKENIZE_ANSWER, "Tokenise a text."))
    async def tokenize(request: Request) -> Response:
        fields = Fields(await json_body(request))
        model = state.ready.model
        text = fields.text("content")
        adds_special = fields.flag("add_special", False)
        if fields.flag("parse_special", True):
            ids = await encode(model, text, adds_special=adds_special)
        else:
            ids = await plain.encode(model, text, adds_special)
        if not fields.flag("with_pieces", False):
            return json_reply({"tokens": ids})
        pieces = Pieces(model.tokenizer)
        return json_reply(
            {"tokens": [{"id": token, "piece": _text_or_bytes(pieces.of(token))} for token in ids]}
        )

    @routes.post(
        "/detokenize", **documented(DETOKENIZE_BODY, DETOKENIZE_ANSWER, "Write tokens as text.")
    )
    async def detokenize(request: Request) -> Response:
        fields = Fields(await json_body(request))
        model = state.ready.model
        ids = fields.get("tokens")
        checked = _token_ids(model, "tokens", [] if ids is None else ids)
        return json_reply({"content": decode(model, checked)})

    return routes


class _PlainText:
    """Tokenises text in which special tokens mean nothing, with a copy of the tokenizer.

    The switch for it is a state of the tokenizer, and the engine's thread decodes with the other.
    """

    def __init__(self) -> None:
        self._model: Model | None = None
        self._tokenizer: Any = None

    async def encode(self, model: Model, text: str, adds_special: bool) -> list[int]:
        if self._model is not model:
            self._tokenizer = await asyncio.to_thread(copy.deepcopy, model.tokenizer)
            self._model = model
        ids: list[int] = self._tokenizer(
            text, add_special_tokens=adds_special, split_special_tokens=True, verbose=False
        ).input_ids
        return ids


def _encode(tokenizer: Any, text: str, adds_special: bool) -> Sequence[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=adds_special, verbose=False).input_ids
    if not getattr(tokenizer, "is_fast", False):
        return ids
    # They are whole numbers from 0: the tokenizers library has no others.
    return TokenIds.known(ids, below=1 + max(ids, default=-1))


async def _prompt(model: Model, value: Any, context_len: int) -> Sequence[int]:
    """One prompt of any shape."""
    if isinstance(value, dict):
        value = _prompt_string(value)
    if isinstance(value, str):
        return await encode(model, value, adds_special=True) or _only_bos(model)
    if not isinstance(value, list | TokenIds):
        raise wrong("prompt", value, "a text, token ids, or a list of prompts")
    if not value:
        raise wrong("prompt", value, "at least one token")
    if len(value) >= context_len:  # each is a token, or a text of one or more
        raise PromptTooLong(len(value), context_len)
    try:
        return whole_numbers(value)  # the engine, which asks if the model has them, trusts these
    except BadToken:
        ids: list[int] = []
    for place, item in enumerate(value):
        if isinstance(item, str):
            ids += await encode(model, item, adds_special=place == 0)
        else:
            ids += _token_ids(model, "prompt", [item])
    return ids or _only_bos(model)


def _prompt_string(value: dict[str, Any]) -> str:
    """The text of a prompt that is an object."""
    fields = Fields(value)
    if fields.get("multimodal_data"):
        raise NotSupported("multimodal_data is given, and this server takes text alone")
    if "prompt_string" not in fields:
        raise wrong("a prompt", value, "an object with prompt_string")
    return fields.text("prompt_string")


def _only_bos(model: Model) -> list[int]:
    bos = model.tokenizer.bos_token_id
    if bos is None:
        raise InvalidRequest("prompt is empty, and the model has no BOS; expected a text")
    return [int(bos)]


def _is_one_prompt(items: Sequence[Any]) -> bool:
    """Whether a list is one prompt: it has a token id in it; texts alone are a prompt each."""
    return any(isinstance(item, int | float) for item in items)


def _token_ids(model: Model, name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise wrong(name, value, "a list of token ids")
    for item in value:
        is_id = isinstance(item, int) and not isinstance(item, bool)
        if not is_id or not 0 <= item < model.vocab_size:
            raise wrong(f"a token of {name}", item, f"an id from 0 to {model.vocab_size - 1}")
    return value


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of those within it."""
    inner = [kind for part in decoder.get("decoders", ()) for kind in _kinds(part)]
    return {decoder.get("type", ""), *inner}


def _byte_letters() -> dict[str, bytes]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}


TOKENIZE_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "description": "the text"},
        "add_special": {"type": "boolean", "default": False, "description": "put a BOS before it"},
        "parse_special": {
            "type": "boolean", "default": True, "description": "special tokens may be written out",
        },
        "with_pieces": {"type": "boolean", "default": False, "description": "the text of each too"},
    },
}  # fmt: skip
_PIECE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["id", "piece"],
    "properties": {
        "id": {"type": "integer"},
        "piece": {
            "description": "a text, or the bytes of a part of a character",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
            ],
        },
    },
}
TOKENIZE_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"tokens": {"type": "array", "items": {"anyOf": [{"type": "integer"}, _PIECE]}}},
}
DETOKENIZE_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
}
DETOKENIZE_ANSWER: Final[dict[str, Any]] = {
    "type": "object", "required": ["content"], "properties": {"content": {"type": "string"}},
}  # fmt: skip
