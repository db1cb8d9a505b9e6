"""What the OpenAPI document says of the bodies and answers of chats.

Owns schemas alone: `conversation`, `tools` and `params` check what they describe, and say what is
wrong. Further fields may be sent; those that have no meaning here are ignored.
"""

from typing import Any, Final

from graphseed.server.text.completion_schemas import SAMPLING

MESSAGES: Final[dict[str, Any]] = {
    "type": "array",
    "description": "the conversation so far",
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {
                "description": "a text, or parts of type text",
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {
                                "type": {"const": "text"}, "text": {"type": "string"},
                            },
                        },
                    },
                    {"type": "null"},
                ],
            },
            "reasoning_content": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"]},
            "tool_call_id": {"type": ["string", "null"]},
            "name": {"type": ["string", "null"]},
        },
    },
}  # fmt: skip
CONVERSATION: Final[dict[str, Any]] = {
    "messages": MESSAGES,
    "tools": {
        "type": ["array", "null"],
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": ["string", "null"]},
                        "parameters": {"type": ["object", "null"], "description": "a JSON schema"},
                    },
                },
            },
        },
    },
    "tool_choice": {"description": "none, auto, required, or a function by its name"},
    "parallel_tool_calls": {"type": ["boolean", "null"]},
    "parse_tool_calls": {"type": ["boolean", "null"], "description": "false: they stay text"},
    "add_generation_prompt": {"type": ["boolean", "null"]},
    "continue_final_message": {
        "type": ["boolean", "null"], "description": "go on with the last message",
    },
    "chat_template_kwargs": {"type": ["object", "null"], "description": "the template's variables"},
    "reasoning_effort": {"type": ["string", "null"], "description": "none: no thoughts"},
    "reasoning_format": {
        "enum": ["auto", "deepseek", "none", None], "description": "none: thoughts stay text",
    },
}  # fmt: skip
CHAT_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["messages"],
    "properties": CONVERSATION
    | SAMPLING
    | {
        "max_completion_tokens": {"type": ["integer", "null"], "minimum": -1},
        "max_tokens": {"type": ["integer", "null"], "minimum": -1},
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 128},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0},
        "stream_options": {"type": ["object", "null"]},
    },
}
COUNT_BODY: Final[dict[str, Any]] = {
    "type": "object", "required": ["messages"], "properties": CONVERSATION,
}  # fmt: skip
COUNT_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["input_tokens", "object"],
    "properties": {"input_tokens": {"type": "integer"}, "object": {"type": "string"}},
}
USAGE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["completion_tokens", "prompt_tokens", "total_tokens"],
    "properties": {
        "completion_tokens": {"type": "integer"},
        "prompt_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
    },
}
CHAT_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["choices", "created", "id", "model", "object", "usage", "timings"],
    "properties": {
        "choices": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["finish_reason", "index", "message"],
                "properties": {
                    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
                    "index": {"type": "integer"},
                    "message": {
                        "type": "object",
                        "required": ["role", "content"],
                        "properties": {
                            "role": {"const": "assistant"},
                            "content": {"type": ["string", "null"]},
                            "reasoning_content": {"type": "string"},
                            "tool_calls": {"type": "array"},
                        },
                    },
                    "logprobs": {"type": "object"},
                },
            },
        },
        "created": {"type": "integer"},
        "id": {"type": "string"},
        "model": {"type": "string"},
        "object": {"const": "chat.completion"},
        "system_fingerprint": {"type": "string"},
        "usage": USAGE,
        "timings": {"type": "object"},
    },
}
PREDICT_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["instances"],
    "properties": {
        "instances": {"type": "array", "minItems": 1, "maxItems": 128, "items": CHAT_BODY}
    },
}
PREDICT_ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["predictions"],
    "properties": {"predictions": {"type": "array", "items": CHAT_ANSWER}},
}
