"""JSON schemas of embeddings, for the OpenAPI document.

Owns what is told of bodies and answers; nothing is validated by it.
"""

from typing import Any, Final

_INPUT: Final[dict[str, Any]] = {
    "description": "a text, token ids, or a list of them",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {}}, {"type": "object"}],
}
_OPTIONS: Final[dict[str, Any]] = {
    "encoding_format": {"type": "string", "enum": ["float", "base64"], "default": "float"},
    "embd_normalize": {
        "type": "integer", "minimum": -1, "default": 2,
        "description": "-1: none, 0: max absolute as int16, 1: taxicab, 2: Euclidean, p: p-norm",
    },
    "dimensions": {"type": "integer", "description": "only the model's own number"},
}  # fmt: skip
OPENAI_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["input"],
    "properties": {"input": _INPUT, "model": {"type": "string"}, **_OPTIONS},
}
NATIVE_BODY: Final[dict[str, Any]] = {
    "type": "object", "properties": {"content": _INPUT, "input": _INPUT, **_OPTIONS},
}  # fmt: skip
_VECTOR: Final[dict[str, Any]] = {"type": "array", "items": {"type": "number"}}
_USAGE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["prompt_tokens", "total_tokens"],
    "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
}
OPENAI_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model", "object", "usage", "data"],
    "properties": {
        "model": {"type": "string"},
        "object": {"const": "list"},
        "usage": _USAGE,
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["object", "index", "embedding"],
                "properties": {
                    "object": {"const": "embedding"},
                    "index": {"type": "integer"},
                    "embedding": {"anyOf": [_VECTOR, {"type": "string"}]},
                },
            },
        },
    },
}
NATIVE_ANSWER: Final[dict[str, Any]] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["index", "embedding"],
        "properties": {
            "index": {"type": "integer"},
            "embedding": {"type": "array", "items": _VECTOR},
        },
    },
}
OPENAI_OR_NATIVE: Final[dict[str, Any]] = {"anyOf": [OPENAI_ANSWER, NATIVE_ANSWER]}
