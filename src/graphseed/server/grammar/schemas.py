"""JSON schemas as clients write them, in the form that xgrammar reads.

Owns `checked_schema` and what it rewrites: the `items` lists of older drafts, and bounds of a
string's length, for which the library would let control characters through, which are no JSON.
Does not know what a schema means: the library parses it and says what is wrong.
"""

import json
from typing import Any, Final

from graphseed.server.errors import InvalidRequest

MAX_DEPTH: Final = (
    100  # levels; what the library needs grows with the cube: 0.1 s here, 30 s at 800
)
MAX_CHARS: Final = 1 << 18

# Where a schema has schemas in it.
_ONE: Final = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_OTHER_BOUNDS: Final = ("const", "enum", "format", "pattern")  # of a string, besides its length
_MAPS: Final = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def checked_schema(schema: object) -> dict[str, Any] | bool:
    """A schema that can be compiled; the client's own is not changed. Raises InvalidRequest.

    A list in `items` is a tuple whose every item is required, as llama-server has it.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"the JSON schema is {schema!r:.100}; expected an object")
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequest(f"the JSON schema is nested deeper than {MAX_DEPTH} levels")
    num_chars = len(json.dumps(schema))
    if num_chars > MAX_CHARS:
        raise InvalidRequest(
            f"the JSON schema has {num_chars} characters; expected {MAX_CHARS} or less"
        )
    rewritten = _rewritten(schema)
    return rewritten if isinstance(rewritten, bool) else dict(rewritten)


def _rewritten(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema  # true, false, or what the library will refuse
    new = dict(schema)
    if isinstance(new.get("items"), list):
        new["prefixItems"] = new.pop("items")
        new["items"] = new.pop("additionalItems", False)
        new.setdefault("minItems", len(new["prefixItems"]))
        new.setdefault("type", "array")
    _bound_by_pattern(new)
    for key in _ONE:
        if key in new:
            new[key] = _rewritten(new[key])
    for key in _LISTS:
        if isinstance(new.get(key), list):
            new[key] = [_rewritten(one) for one in new[key]]
    for key in _MAPS:
        if isinstance(new.get(key), dict):
            new[key] = {name: _rewritten(one) for name, one in new[key].items()}
    return new


def _bound_by_pattern(schema: dict[str, Any]) -> None:
    kind = schema.get("type")
    is_string = kind == "string" or (isinstance(kind, list) and "string" in kind)
    bounds = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
    is_usual = all(type(bound) is int and bound >= 0 for bound in bounds.values())
    if not bounds or not is_usual or not is_string or any(key in schema for key in _OTHER_BOUNDS):
        return  # nothing to do, or something that the library will refuse
    schema["pattern"] = rf"^[\s\S]{{{bounds.get('minLength', 0)},{bounds.get('maxLength', '')}}}$"
    for key in bounds:
        del schema[key]


def _depth(value: object) -> int:
    """Levels of lists and objects; counted without recursion, since clients choose them."""
    level, depth = [value], 0
    while level:
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level, depth = inner, depth + 1
    return depth
