"""The static buffers a step reads, and the one copy that fills them.

Owns Staging: two verbs, `stage(plan)` and the views a step is built over. Recordings bake these
addresses in (I7). Does not know what the numbers mean to the model.
"""

# T rows of the step, S sequences, M blocks of a sequence

import numpy as np
import torch

from graphseed.capture.driver import Driver, Mark
from graphseed.engine.config import EngineConfig
from graphseed.engine.plan import StepPlan

RING = 4  # host copies in flight; one is written again only when its copy is done


class Staging:
    """Token ids, positions, KV indices, sequence starts, lengths, read rows and block tables.

    One int32 device buffer, filled by one copy from a ring of (pinned) host buffers. Owned by the
    engine; engine thread only.
    """

    def __init__(self, config: EngineConfig, device: torch.device, driver: Driver) -> None:
        rows, seqs = max(config.num_ubatch, config.num_parallel), config.num_parallel
        sizes = {
            "token_ids": (rows,), "positions": (rows,), "kv_indices": (rows,),
            "logits_rows": (seqs,), "seq_starts": (seqs + 1,), "kv_lens": (seqs,),
            "block_tables": (seqs, config.max_blocks),
        }  # fmt: skip
        self._offsets: dict[str, tuple[int, tuple[int, ...]]] = {}
        total = 0
        for name, shape in sizes.items():
            self._offsets[name] = (total, shape)
            # Aligned, so that every field keeps the alignment kernels were specialised for.
            total += -(-int(np.prod(shape)) // 64) * 64
        self._driver = driver
        self._is_cpu = device.type == "cpu"
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        ring = 1 if self._is_cpu else RING
        self._host = [
            torch.zeros(total, dtype=torch.int32, pin_memory=not self._is_cpu) for _ in range(ring)
        ]
        self._fields = [
            {name: self._view(host.numpy(), name) for name in sizes} for host in self._host
        ]
        self._in_flight: list[Mark | None] = [None] * ring
        self._next = 0

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """The device buffer's address, as a binding."""
        return (("staging", self._device.data_ptr()),)

    def view(self, name: str) -> torch.Tensor:
        """One field of the device buffer, int32, in its full capacity."""
        start, shape = self._offsets[name]
        return self._device[start : start + int(np.prod(shape))].view(shape)

    def stage(self, plan: StepPlan) -> None:
        """Copy one plan into the device buffer, in order with the work of the stream."""
        slot = self._next
        self._next = (slot + 1) % len(self._host)
        done = self._in_flight[slot]
        if done is not None:
            done.wait()
        self._fill(self._fields[slot], plan)
        self._device.copy_(self._host[slot], non_blocking=True)
        if not self._is_cpu:
            self._in_flight[slot] = self._driver.mark()

    def _fill(self, fields: dict[str, np.ndarray], plan: StepPlan) -> None:
        row = 0
        starts, lens, rows = fields["seq_starts"], fields["kv_lens"], fields["logits_rows"]
        rows[:] = 0
        lens[:] = 0
        for index, part in enumerate(plan.parts):
            end = row + len(part.token_ids)
            fields["token_ids"][row:end] = part.token_ids
            fields["positions"][row:end] = np.arange(part.start, part.kv_len)
            fields["kv_indices"][row:end] = part.table.kv_indices(part.start, part.kv_len)
            starts[index], lens[index], rows[index] = row, part.kv_len, end - 1
            ids = part.table.ids
            fields["block_tables"][index, : len(ids)] = ids
            row = end
        starts[len(plan.parts) :] = row
        # Padding: token 0 at position 0, K/V into block 0, which nobody reads.
        for name in ("token_ids", "positions", "kv_indices"):
            fields[name][row : plan.capacity] = 0

    def _view(self, flat: np.ndarray, name: str) -> np.ndarray:
        start, shape = self._offsets[name]
        return flat[start : start + int(np.prod(shape))].reshape(shape)
