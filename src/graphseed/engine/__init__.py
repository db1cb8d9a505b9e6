"""The engine: plans, stages and runs prompts and decode steps of one model on one device.

Owns requests, KV memory and the steps. Sees the Driver protocol and no driver.
"""

from graphseed.engine.answer import Cancelled, DeadlineExceeded, Delta
from graphseed.engine.config import EngineConfig
from graphseed.engine.core import EngineCore
from graphseed.engine.engine import Engine
from graphseed.engine.errors import (
    BadParameter,
    BadToken,
    DeviceMemoryError,
    EmptyPrompt,
    EngineBusy,
    ModelCannot,
    NotFinite,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from graphseed.engine.grammar import Grammar
from graphseed.engine.handles import AsyncHandle, Handle
from graphseed.engine.request import FinishReason, Pooling, Request, SamplingParams, Status

__all__ = [
    "AsyncHandle", "BadParameter", "BadToken", "Cancelled", "DeadlineExceeded", "Delta",
    "DeviceMemoryError", "EmptyPrompt", "Engine", "EngineBusy", "EngineConfig", "EngineCore",
    "FinishReason", "Grammar", "Handle", "ModelCannot", "NotFinite", "Pooling", "PromptTooLong",
    "QueueFull", "Request", "RequestError", "SamplingParams", "Status",
]  # fmt: skip
