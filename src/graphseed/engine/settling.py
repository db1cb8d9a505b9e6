"""When policy `resident` captures: where it delays nobody, or for a bounded time.

Owns Settler: which moments are used, how much a running stream may be held up, and the measured
delays. The cache does the capturing.
"""

import logging
import time
from typing import Final

from graphseed.capture.cache import GraphCache
from graphseed.capture.identity import Namespace
from graphseed.engine.scheduler import Batch

logger = logging.getLogger(__name__)

# While streams run, captures may take at most one part in so many of the time.
SHARE: Final = 10


class Settler:
    """Calls `settle` for one engine. Engine thread only."""

    def __init__(self, cache: GraphCache, budget_ms: float) -> None:
        self._cache = cache
        self._budget_ms = budget_ms
        self._not_before_ns = 0
        self.last_ms = 0.0  # the last capture's duration: what the next is expected to take
        self._is_said = False
        self.longest_streaming_ms = 0.0  # the longest delay a running stream had

    def after_step(self, batch: Batch, is_streaming: bool) -> None:
        """Capture one graph beside the step that was just submitted, if that is allowed now.

        With no stream running, after a prompt step of which more will follow. Beside running
        streams, only when a capture is expected to stay within the budget (as the last one did; the
        first is not known), and then not again until `SHARE` times as long has passed.
        """
        now = time.perf_counter_ns()
        if is_streaming:
            if now < self._not_before_ns:
                return
            if self.last_ms > self._budget_ms:
                self._say_suspended()
                return
        elif batch.namespace is not Namespace.PROMPT or all(part.is_last for part in batch.parts):
            return
        if self._cache.settle(1):  # tried, refused or not
            took_ns = time.perf_counter_ns() - now
            self.last_ms = took_ns / 1e6
            self._not_before_ns = now + SHARE * took_ns
            if is_streaming:
                self.longest_streaming_ms = max(self.longest_streaming_ms, self.last_ms)

    def _say_suspended(self) -> None:
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "a capture took %.0f ms, more than the %.0f ms it may hold up running streams: "
                "further ones wait for a moment without streams", self.last_ms, self._budget_ms,
            )  # fmt: skip
