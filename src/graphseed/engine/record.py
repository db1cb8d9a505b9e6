"""Plans on record: every step an engine ran, and the proof that it can be run again (I9).

Owns the file format (JSON lines: a header, a line for each step, an end), PlanRecorder, which
writes it, and `replay`, which runs it with graphs disabled and compares digests. Does not load
models.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from graphseed.capture.cache import GraphCache
from graphseed.capture.driver import Driver
from graphseed.capture.errors import GraphseedError
from graphseed.capture.identity import Namespace
from graphseed.capture.selector import Policy, Selection
from graphseed.engine.config import EngineConfig
from graphseed.engine.core import EngineCore
from graphseed.engine.kv import KvMemory
from graphseed.engine.plan import Reads, SequencePart, StepPlan
from graphseed.engine.step import StepRunner
from graphseed.models.model import Model

FORMAT: Final = 2
_HEADER: Final = (
    "model", "dtype", "device", "context_len", "num_ubatch", "num_parallel", "block_len", "kv_len",
    "embeds",
)  # fmt: skip


class BadRecord(GraphseedError, ValueError):
    """The file is no record of plans, or not of this model."""


class PlanRecorder:
    """An observer that writes each step's plan and the digest of what it reads.

    Set it as a core's `observer` before the first request; `close` it before the core. It waits for
    the device at each step: for proofs, not for speed.
    """

    def __init__(self, path: Path, core: EngineCore) -> None:
        self._core = core
        self._written: set[int] = set()  # kv indices
        self._out = path.open("w", encoding="utf-8")
        config = core.config
        self._write(
            {
                "format": FORMAT, "model": core.model.name, "source": core.model.source,
                "dtype": str(core.model.dtype).removeprefix("torch."),
                "device": core.driver.device, "torch": torch.__version__,
                "context_len": config.context_len, "num_ubatch": config.num_ubatch,
                "num_parallel": config.num_parallel, "block_len": config.block_len,
                "kv_len": config.kv_len, "embeds": config.embeds,
            }
        )  # fmt: skip

    def before(self, plan: StepPlan) -> None:
        """Nothing to see yet."""

    def after(self, plan: StepPlan, output: torch.Tensor) -> None:
        """Write one step."""
        parts = []
        for part in plan.parts:
            num_blocks = -(-part.kv_len // self._core.config.block_len)
            self._written.update(part.table.kv_indices(part.start, part.kv_len).tolist())
            parts.append(
                {
                    "token_ids": part.token_ids.tolist(), "start": part.start,
                    "blocks": part.table.ids[:num_blocks].tolist(),
                }
            )  # fmt: skip
        self._write(
            {
                "namespace": plan.namespace.value, "capacity": plan.capacity,
                "seq_capacity": plan.seq_capacity, "reads": plan.reads.value, "parts": parts,
                "output": _digest(output),
            }
        )  # fmt: skip

    def close(self) -> None:
        """Write the digest of all written KV rows and close the file. May be called twice."""
        if self._out.closed:
            return
        indices = torch.tensor(sorted(self._written), dtype=torch.int64)
        self._write({"kv": self._core.runner.kv.digest(indices)})
        self._out.close()

    def _write(self, line: dict[str, object]) -> None:
        self._out.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """A block table read back from a record."""

    ids: npt.NDArray[np.int32]
    block_len: int

    def kv_indices(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Where the K/V of positions start..end-1 lives."""
        positions = np.arange(start, end, dtype=np.int32)
        blocks = self.ids[positions // self.block_len]
        return np.asarray(blocks * self.block_len + positions % self.block_len, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What running a record again showed."""

    num_steps: int
    differing_steps: tuple[int, ...]  # numbers of steps whose output differs
    is_kv_equal: bool

    @property
    def is_equal(self) -> bool:
        """Whether every byte that was recorded came out again."""
        return not self.differing_steps and self.is_kv_equal


def read_header(path: Path) -> dict[str, Any]:
    """The first line of a record. Raises BadRecord."""
    header = next(_lines(path), None)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BadRecord(f"{path} is no record of plans in format {FORMAT}")
    missing = [name for name in _HEADER if name not in header]
    if missing:
        raise BadRecord(f"the header of {path} lacks {', '.join(missing)}")
    return header


def replay(path: Path, model: Model, driver: Driver) -> ReplayReport:
    """Run a record's plans with graphs disabled on fresh memory and compare the digests.

    Raises BadRecord for a file that is not whole, whose dtype is not the model's, or whose steps
    read K/V that none of them wrote.
    """
    header = read_header(path)
    dtype = str(model.dtype).removeprefix("torch.")
    if header["dtype"] != dtype:
        raise BadRecord(f"{path} was recorded in {header['dtype']} and the model is in {dtype}")
    config = EngineConfig(
        context_len=header["context_len"], num_ubatch=header["num_ubatch"],
        num_parallel=header["num_parallel"], block_len=header["block_len"],
        kv_len=header["kv_len"], embeds=header["embeds"],
    )  # fmt: skip
    kv = KvMemory(
        model.layers, config.num_blocks, config.block_len, model.dtype, model.device,
        driver.free_bytes(),
    )  # fmt: skip
    cache = GraphCache(driver, Selection(Policy.OFF, Policy.OFF))
    runner = StepRunner(model, driver, cache, config, kv)
    written = np.zeros(config.num_blocks * config.block_len, dtype=np.bool_)  # by kv index
    differing, num_steps, kv_digest = [], 0, None
    for line in _lines(path, skip=1):
        if "kv" in line:
            kv_digest = line["kv"]
            continue
        try:
            plan = _plan_of(line, config.block_len)
            is_whole = _note(plan, written)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadRecord(f"step {num_steps} of {path} is no plan: {error!r}") from None
        if not is_whole:
            raise BadRecord(
                f"step {num_steps} of {path} reads K/V that no recorded step wrote: a slot was "
                "restored from a file, or the engine ran before it was recorded; record an engine "
                "from its first request on, without restored slots"
            )
        if _digest(runner.run(plan)) != line["output"]:
            differing.append(num_steps)
        num_steps += 1
    if kv_digest is None:
        raise BadRecord(f"{path} has no end: the recording engine was not closed")
    is_kv_equal = kv.digest(torch.from_numpy(written.nonzero()[0])) == kv_digest
    return ReplayReport(num_steps, tuple(differing), is_kv_equal)


def _plan_of(line: dict[str, Any], block_len: int) -> StepPlan:
    parts = tuple(
        SequencePart(
            np.asarray(part["token_ids"], dtype=np.int32), part["start"],
            RecordedTable(np.asarray(part["blocks"], dtype=np.int32), block_len),
        )
        for part in line["parts"]
    )  # fmt: skip
    return StepPlan(
        Namespace(line["namespace"]), line["capacity"], parts, line["seq_capacity"],
        Reads(line["reads"]),
    )  # fmt: skip


def _note(plan: StepPlan, written: npt.NDArray[np.bool_]) -> bool:
    """Note what a plan writes; whether all that it reads was written before."""
    is_whole = True
    for part in plan.parts:
        is_whole &= bool(written[part.table.kv_indices(0, part.start)].all())
        written[part.table.kv_indices(part.start, part.kv_len)] = True
    return is_whole


def _lines(path: Path, skip: int = 0) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number >= skip:
                    yield json.loads(line)
    except (OSError, ValueError) as error:
        raise BadRecord(f"{path} cannot be read as a record of plans: {error}") from None


def _digest(output: torch.Tensor) -> str:
    return hashlib.sha256(output.cpu().numpy().tobytes()).hexdigest()
