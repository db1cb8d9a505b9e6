"""Names into ready models: resolving, loading, attention and its kernels.

Names of it resolve when they are first used: importing the package does not import torch.
"""

from importlib import import_module
from typing import Any, Final

_HOMES: Final = {
    "Model": "graphseed.models.model",
    "ModelError": "graphseed.models.errors",
    "ModelNotFound": "graphseed.models.errors",
    "ModelUnsupported": "graphseed.models.errors",
    "load_model": "graphseed.models.load",
    "preset_config": "graphseed.models.presets",
    "random_model": "graphseed.models.load",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graphseed.models' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
