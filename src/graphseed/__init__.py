"""graphseed: a prompt's graph, captured when first seen and replayed as one launch ever after.

Importing it does not import torch: names resolve when they are first used.
"""

from importlib import import_module
from typing import Any, Final

__version__ = "0.1.0"

_HOMES: Final = {
    "Engine": "graphseed.api",
    "EngineConfig": "graphseed.engine",
    "EngineCore": "graphseed.engine",
    "GraphCache": "graphseed.capture",
    "GraphseedError": "graphseed.capture",
    "Policy": "graphseed.capture",
    "SamplingParams": "graphseed.engine",
    "load_model": "graphseed.models",
    "open_driver": "graphseed.drivers",
    "read_selectors": "graphseed.capture",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graphseed' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
