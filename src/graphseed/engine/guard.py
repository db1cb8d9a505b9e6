"""Turns what a device can do wrong into errors of ours.

Owns DeviceGuard: out of memory ends one request and gives graphs back, a lost device ends the
engine. Does not know requests.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar

from graphseed.capture.cache import GraphCache
from graphseed.capture.driver import Driver
from graphseed.capture.errors import DeviceLost
from graphseed.capture.events import Cause
from graphseed.capture.identity import Namespace
from graphseed.engine.errors import DeviceMemoryError
from graphseed.engine.kv import is_out_of_memory

R = TypeVar("R")


class DeviceGuard:
    """Runs device work for one engine. Engine thread only."""

    def __init__(self, driver: Driver, cache: GraphCache) -> None:
        self._driver = driver
        self._cache = cache
        self.is_lost = False

    def run(self, what: str, call: Callable[[], R]) -> R:
        """Return what `call` returns. Raises DeviceMemoryError, DeviceLost, or its own error."""
        try:
            return call()
        except DeviceLost:
            self.is_lost = True
            raise
        except (RuntimeError, MemoryError) as error:
            try:
                failure = self._classify(what, error)
            except DeviceLost:
                self.is_lost = True
                raise
        # Raised out of the except block: the original's traceback would keep the step's tensors.
        raise failure

    def _classify(self, what: str, error: RuntimeError | MemoryError) -> Exception:
        if is_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)
            free_bytes = self._driver.free_bytes()
            for namespace in Namespace:  # what graphs hold is the first memory to give back
                self._cache.release(namespace, Cause.MEMORY)
            advice = "lower -ub or -c, or free memory of the device; the next request can run"
            return DeviceMemoryError(what, None, free_bytes, advice)
        if self._driver.is_lost(error):
            self.is_lost = True
            return DeviceLost(f"the device was lost in {what}: {error}; start a new process")
        return error
