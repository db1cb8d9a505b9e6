"""What happened, as log lines.

Owns LogLines, a subscriber that writes to the standard `logging` module. Configures nothing: how
lines look and where they go is the command line's business.
"""

import logging

from graphseed.capture.events import (
    Alarm,
    Deferred,
    Event,
    Refused,
    Released,
    Replayed,
    Seeded,
    Stale,
)

logger = logging.getLogger("graphseed")


class LogLines:
    """One line for the first seed and replay of each identity, and for whatever is unusual."""

    def __call__(self, event: Event) -> None:
        name = event.namespace.value
        match event:
            case Seeded(num_seeds=count):
                level = logging.INFO if count == 1 else logging.DEBUG
                logger.log(
                    level,
                    "%s graph instantiated, not launched: device=%s first=%s batch=%s nodes=%d "
                    "bytes=%d capture_ms=%.2f instantiate_ms=%.2f",
                    name, event.device, event.identity.first_node, event.identity.get("batch"),
                    event.num_nodes, event.num_bytes, event.capture_ns / 1e6,
                    event.instantiate_ns / 1e6,
                )  # fmt: skip
                logger.debug("root=%s identity=[%s]", event.root, event.identity)
            case Replayed(num_replays=1):
                logger.info(
                    "%s graph replayed for the first time: device=%s first=%s batch=%s",
                    name, event.device, event.identity.first_node, event.identity.get("batch"),
                )  # fmt: skip
            case Refused():
                again = "not in this generation" if event.retry_at is None else "after a pause"
                logger.warning(
                    "%s graph refused, runs direct: reason=%s (%s) tried again: %s identity=[%s]",
                    name, event.reason.value, event.detail, again, event.identity,
                )  # fmt: skip
            case Released():
                logger.info(
                    "%s graphs released: cause=%s entries=%d bytes_held=%d bytes_returned=%d "
                    "ms=%.2f", name, event.cause.value, event.num_entries, event.bytes_held,
                    event.bytes_returned, event.elapsed_ns / 1e6,
                )  # fmt: skip
            case Stale():
                logger.info(
                    "%s graphs stale: entries=%d moved=%s", name, event.num_entries,
                    ", ".join(event.names[:8]),
                )  # fmt: skip
            case Deferred():
                logger.info(
                    "%s graphs: release waits for %d unfinished prompts", name, event.num_unfinished
                )
            case Alarm():
                logger.warning("alarm: %s", event.message)
