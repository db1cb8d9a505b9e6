"""The paged KV memory of one model on one device.

Owns the K and V caches of every layer. Does not know who holds which block.
"""

# B blocks, N tokens of a block, H KV heads, D head dim

import hashlib
from collections.abc import Sequence
from typing import Final

import torch

from graphseed.engine.errors import DeviceMemoryError
from graphseed.models.model import LayerShape

_OUT_OF_MEMORY: Final = ("can't allocate memory", "out of memory", "ALLOC_FAILED")


class KvMemory:
    """K and V of every layer, [B, N, H, D] each. Owned by the engine; freed with it.

    Raises DeviceMemoryError when the device cannot hold it.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_len: int,
        dtype: torch.dtype,
        device: torch.device,
        free_bytes: int,
    ) -> None:
        shapes = [(num_blocks, block_len, la.num_kv_heads, la.head_dim) for la in layers]
        self.num_bytes = num_blocks * block_len * bytes_per_token(layers, dtype)
        out_of_memory = DeviceMemoryError(
            f"KV memory of {num_blocks * block_len} tokens", self.num_bytes, free_bytes,
            "lower the context size (-c)",
        )  # fmt: skip
        # A host promises memory that it does not have and ends the process at the first write.
        if device.type == "cpu" and self.num_bytes > free_bytes:
            raise out_of_memory
        try:
            # Zeroed: a padded row attends to nothing, but its block must hold finite numbers.
            self.k = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
            self.v = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory from None

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """First and last address of the caches, as bindings."""
        return (("kv first", self.k[0].data_ptr()), ("kv last", self.v[-1].data_ptr()))

    def digest(self, kv_indices: torch.Tensor) -> str:
        """SHA-256 of the rows at `kv_indices` ([T], any int dtype), layer by layer, K then V."""
        sha = hashlib.sha256()
        for cache in self._caches:
            rows = cache.flatten(0, 1).index_select(0, kv_indices.to(cache.device).long())
            sha.update(rows.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def read_blocks(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Copies of some blocks on the host, [len(blocks), N, H, D] each: layer by layer, K then V.

        Waits for the device.
        """
        numbers = torch.tensor(blocks, dtype=torch.long, device=self.k[0].device)
        return [cache.index_select(0, numbers).cpu() for cache in self._caches]

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Overwrite some blocks by what `read_blocks` returns."""
        numbers = torch.tensor(blocks, dtype=torch.long, device=self.k[0].device)
        with torch.inference_mode(False):
            for cache, own in zip(self._caches, rows, strict=True):
                cache.index_copy_(0, numbers, own.to(cache.device))

    @property
    def _caches(self) -> tuple[torch.Tensor, ...]:
        return tuple(cache for pair in zip(self.k, self.v, strict=True) for cache in pair)


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """KV bytes that one token takes over all layers."""
    return sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers) * dtype.itemsize


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch says so in its own type, libraries in their messages."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)
