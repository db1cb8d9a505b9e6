"""What the OpenAPI document says of the bodies and answers of text completions.

Owns schemas alone: `params` and `tokens` check what they describe, and say what is wrong. Further
fields may be sent; those that have no meaning here are ignored.
"""

from typing import Any, Final


def _maybe(kind: str, description: str, **more: Any) -> dict[str, Any]:
    """A field that may be null, which is as good as absent."""
    return {"type": [kind, "null"], "description": description, **more}


_TOKENS: Final[dict[str, Any]] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT_OBJECT: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["prompt_string"],
    "properties": {"prompt_string": {"type": "string"}},
}
_ONE_PROMPT: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]},
        },
        _TEXT_OBJECT,
    ]
}
PROMPT: Final[dict[str, Any]] = {
    "description": "a text, token ids, both mixed, {prompt_string}, or a list of prompts",
    "anyOf": [*_ONE_PROMPT["anyOf"], {"type": "array", "minItems": 1, "items": _ONE_PROMPT}],
}
_STOP: Final[dict[str, Any]] = {
    "description": "a text, or a list of texts, that ends the answer",
    "anyOf": [
        {"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 256},
        {"type": "null"},
    ],
}  # fmt: skip
_BIAS: Final[dict[str, Any]] = {
    "description": "[token, bias] pairs or {token: bias}; a token is an id or a text, false: never",
    "anyOf": [
        {"type": "array"},
        {"type": "object", "additionalProperties": {"type": ["number", "boolean"]}},
        {"type": "null"},
    ],
}

# What both dialects read.
SAMPLING: Final[dict[str, Any]] = {
    "temperature": _maybe("number", "0: greedy"),
    "top_k": _maybe("integer", "0: all"),
    "top_p": _maybe("number", "1: off"),
    "min_p": _maybe("number", "0: off"),
    "typical_p": _maybe("number", "1: off"),
    "repeat_penalty": _maybe("number", "1: off", exclusiveMinimum=0, maximum=1e6),
    "repeat_last_n": _maybe("integer", "tokens that penalties look back on; -1: all", minimum=-1),
    "presence_penalty": _maybe("number", "0: off", minimum=-1e6, maximum=1e6),
    "frequency_penalty": _maybe("number", "0: off", minimum=-1e6, maximum=1e6),
    "logit_bias": _BIAS,
    "seed": _maybe("integer", "-1: drawn, and reported"),
    "stop": _STOP,
    "ignore_eos": _maybe("boolean", "go on after the end of sequence"),
    "grammar": _maybe("string", "GBNF that the answer follows"),
    "json_schema": {"description": "a JSON schema that the answer follows"},
    "response_format": _maybe("object", "text, json_object or json_schema"),
    "samplers": {"description": "the samplers to apply; those left out are not"},
    "stream": _maybe("boolean", "answer with events"),
    "cache_prompt": _maybe("boolean", "whether cached beginnings of the prompt may be used"),
    "id_slot": _maybe("integer", "the slot to wait for; -1: any", minimum=-1),
    "return_progress": _maybe("boolean", "tell in a stream how far the prompt is"),
    "timings_per_token": _maybe("boolean", "timings in every chunk"),
    "t_max_predict_ms": _maybe("number", "ends the answer so long after its first token"),
    "n_keep": _maybe("integer", "accepted, and without meaning here: no context is shifted"),
    "verbose": _maybe("boolean", "llama-server's object too, as __verbose"),
    "sse_ping_interval": _maybe("number", "seconds between pings of a silent stream; -1: none"),
}
NATIVE_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": PROMPT,
        "n_predict": _maybe("integer", "new tokens; -1: no limit, 0: the prompt alone", minimum=-2),
        "n_cmpl": _maybe("integer", "answers to each prompt", minimum=1, maximum=128),
        "n_probs": _maybe("integer", "likely tokens to report with each token", minimum=0),
        "post_sampling_probs": _maybe("boolean", "probabilities after the filters"),
        "return_tokens": _maybe("boolean", "token ids of the answer too"),
        "response_fields": {
            "description": "fields of the answer to send; a/b is b within a",
            "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
        },
        **SAMPLING,
    },
}
TEXT_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": PROMPT,
        "model": _maybe("string", "ignored: there is one"),
        "max_tokens": _maybe("integer", "new tokens; -1: no limit", minimum=-2),
        "n": _maybe("integer", "choices for each prompt", minimum=1, maximum=128),
        "logprobs": {
            "description": "likely tokens to report with each token",
            "anyOf": [{"type": "integer", "minimum": 0}, {"type": ["boolean", "null"]}],
        },
        "echo": _maybe("boolean", "only false is supported"),
        "stream_options": _maybe(
            "object", "include_usage", properties={"include_usage": {"type": "boolean"}}
        ),
        **SAMPLING,
    },
}

TIMINGS: Final[dict[str, Any]] = {"type": "object", "additionalProperties": {"type": "number"}}
USAGE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["completion_tokens", "prompt_tokens", "total_tokens"],
    "properties": {
        "completion_tokens": {"type": "integer"},
        "prompt_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {
            "type": "object", "properties": {"cached_tokens": {"type": "integer"}},
        },
    },
}  # fmt: skip
_NATIVE_ONE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "index": {"type": "integer"},
        "content": {"type": "string"},
        "tokens": _TOKENS,
        "id_slot": {"type": "integer"},
        "stop": {"type": "boolean"},
        "model": {"type": "string"},
        "tokens_predicted": {"type": "integer"},
        "tokens_evaluated": {"type": "integer"},
        "tokens_cached": {"type": "integer"},
        "generation_settings": {"type": "object"},
        "prompt": {"type": "string"},
        "has_new_line": {"type": "boolean"},
        "truncated": {"type": "boolean"},
        "stop_type": {"enum": ["none", "eos", "limit", "word"]},
        "stopping_word": {"type": "string"},
        "timings": TIMINGS,
        "completion_probabilities": {"type": "array", "items": {"type": "object"}},
    },
}
NATIVE_ANSWER: Final[dict[str, Any]] = {
    "description": "an answer; for several prompts or answers, a list of them",
    "anyOf": [_NATIVE_ONE, {"type": "array", "items": _NATIVE_ONE}],
}
TEXT_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "text_completion"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "system_fingerprint": {"type": "string"},
        "choices": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["text", "index", "finish_reason"],
                "properties": {
                    "text": {"type": "string"},
                    "index": {"type": "integer"},
                    "logprobs": {"type": ["object", "null"]},
                    "finish_reason": {"enum": ["stop", "length", None]},
                },
            },
        },
        "usage": USAGE,
        "timings": TIMINGS,
    },
}
