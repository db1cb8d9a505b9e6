"""JSON schemas of reranking, for the OpenAPI document.

Owns what is told of bodies and answers; nothing is validated by it.
"""

from typing import Any, Final

_TEXTS: Final[dict[str, Any]] = {"type": "array", "items": {"type": "string"}, "minItems": 1}
BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["query"],
    "properties": {
        "query": {"type": "string"},
        "documents": _TEXTS | {"description": "what is ranked; answered in Jina's form"},
        "texts": _TEXTS | {"description": "what is ranked; answered in TEI's form"},
        "top_n": {"type": "integer", "minimum": 0, "description": "of the best; all by default"},
        "return_text": {
            "type": "boolean", "default": False, "description": "each text too, in TEI's form",
        },
        "model": {"type": "string", "description": "ignored: there is one"},
    },
}  # fmt: skip
_JINA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model", "object", "usage", "results"],
    "properties": {
        "model": {"type": "string"},
        "object": {"const": "list"},
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "total_tokens"],
            "properties": {
                "prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"},
            },
        },
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "relevance_score"],
                "properties": {
                    "index": {"type": "integer"}, "relevance_score": {"type": "number"},
                },
            },
        },
    },
}  # fmt: skip
_TEI: Final[dict[str, Any]] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["index", "score"],
        "properties": {
            "index": {"type": "integer"}, "score": {"type": "number"}, "text": {"type": "string"},
        },
    },
}  # fmt: skip
ANSWER: Final[dict[str, Any]] = {
    "description": "the best first; a list alone where the body says texts",
    "anyOf": [_JINA, _TEI],
}
