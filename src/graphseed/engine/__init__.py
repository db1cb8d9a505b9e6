"""The engine: plans, stages and runs prompts and decode steps of one model on one device.

Owns requests, KV memory and the steps. Sees the Driver protocol and no driver.
"""

from graphseed.engine.config import EngineConfig
from graphseed.engine.engine import Delta, Engine
from graphseed.engine.errors import (
    BadParameter,
    DeviceMemoryError,
    EmptyPrompt,
    PromptTooLong,
    RequestError,
    TokenOutOfRange,
)
from graphseed.engine.request import FinishReason, Request, SamplingParams, Status

__all__ = [
    "BadParameter", "Delta", "DeviceMemoryError", "EmptyPrompt", "Engine", "EngineConfig",
    "FinishReason", "PromptTooLong", "Request", "RequestError", "SamplingParams", "Status",
    "TokenOutOfRange",
]  # fmt: skip
