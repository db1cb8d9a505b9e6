"""Public helpers for tests of graphs: a scripted driver and equality of bytes.

Names resolve when they are first used, so that policy tests need no torch.
"""

from importlib import import_module
from typing import Any, Final

_HOMES: Final = {
    "ScriptedDriver": "graphseed.testing.scripted",
    "assert_bitwise": "graphseed.testing.bitwise",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graphseed.testing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
