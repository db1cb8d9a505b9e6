"""What an engine is told, and how the automatic parts are resolved.

Owns EngineConfig. A frozen value: `resolve` returns a new one and logs each choice. Does not know
requests.
"""

import logging
from dataclasses import dataclass, replace
from typing import Final

from graphseed.engine.errors import BadParameter

logger = logging.getLogger(__name__)

MAX_AUTO_SHARE: Final = 0.5  # of the free device memory that an automatic context may take for KV


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. Raises BadParameter for a value out of range."""

    context_len: int = 0  # tokens of one sequence, prompt and answer; 0: the model's, if it fits
    num_ubatch: int = 512  # tokens that one forward pass sees at most
    num_parallel: int = 1  # sequences at once
    block_len: int = 16  # tokens of one KV block, a power of two
    kv_len: int = 0  # tokens that the KV memory holds; 0: every sequence to its full length
    reuses_prefixes: bool = True  # whether a prompt may share the blocks of an earlier one
    max_waiting: int = 1024  # requests that may wait for a slot
    embeds: bool = False  # whether requests may ask for embeddings; takes a buffer of hidden states
    settle_budget_ms: float = 100.0  # that a capture may hold up running streams (resident)

    def __post_init__(self) -> None:
        if self.context_len != 0 and self.context_len < 2:
            raise BadParameter("context_len (-c)", self.context_len, "0 (the model's) or >= 2")
        if self.num_ubatch < 1:
            raise BadParameter("num_ubatch (-ub)", self.num_ubatch, "at least 1")
        if self.num_parallel < 1:
            raise BadParameter("num_parallel (-np)", self.num_parallel, "at least 1")
        if self.block_len < 16 or self.block_len & (self.block_len - 1):
            raise BadParameter("block_len", self.block_len, "a power of two, at least 16")

        if self.kv_len and self.kv_len < self.context_len:
            expected = f"0 or at least one sequence of {self.context_len} tokens"
            raise BadParameter("kv_len", self.kv_len, expected)
        if self.max_waiting < 0:
            raise BadParameter("max_waiting", self.max_waiting, "0 or more")
        if self.settle_budget_ms < 0:
            raise BadParameter("settle_budget_ms", self.settle_budget_ms, "0 or more")

    @property
    def max_blocks(self) -> int:
        """Blocks that one sequence can hold."""
        return -(-self.context_len // self.block_len)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, block 0 (which nobody reads) included."""
        if self.kv_len:
            return -(-self.kv_len // self.block_len) + 1
        return self.max_blocks * self.num_parallel + 1


def resolve(
    config: EngineConfig, *, model_context_len: int, kv_bytes_per_token: int, free_bytes: int
) -> EngineConfig:
    """Replace what is automatic by what this model and device allow, and log the choice."""
    if config.context_len:
        if config.context_len > model_context_len:
            logger.warning(
                "context size %d is above the %d tokens the model was trained for: answers may "
                "degrade", config.context_len, model_context_len,
            )  # fmt: skip
        return config
    budget = int(free_bytes * MAX_AUTO_SHARE) // (kv_bytes_per_token * config.num_parallel)
    context_len = max(2, min(model_context_len, budget))
    if context_len < model_context_len:
        logger.warning(
            "context size set to %d of the model's %d tokens: its KV may take half of the %d MiB "
            "free", context_len, model_context_len, free_bytes >> 20,
        )  # fmt: skip
    else:
        logger.info("context size set to the model's %d tokens", context_len)
    return replace(config, context_len=context_len)
