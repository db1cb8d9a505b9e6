"""The engine: plans, stages and runs prompts and decode steps of one model on one device.

Owns requests, KV memory and the steps. Sees the Driver protocol and no driver.
"""

from graphseed.engine.answer import Delta
from graphseed.engine.config import EngineConfig
from graphseed.engine.engine import Engine
from graphseed.engine.errors import (
    BadParameter,
    BadToken,
    DeviceMemoryError,
    EmptyPrompt,
    EngineBusy,
    NotFinite,
    PromptTooLong,
    RequestError,
)
from graphseed.engine.request import FinishReason, Request, SamplingParams, Status

__all__ = [
    "BadParameter", "BadToken", "Delta", "DeviceMemoryError", "EmptyPrompt", "Engine", "EngineBusy",
    "EngineConfig", "FinishReason", "NotFinite", "PromptTooLong", "Request", "RequestError",
    "SamplingParams", "Status",
]  # fmt: skip
