"""The engine's logits beside those of the plain Hugging Face forward of the same weights.

Owns the tolerances and the comparison. Takes what a proof read; runs each sequence once through
the module with Hugging Face's own attention and experts. Does not know policies: `verify` showed
that all of them have these bytes.
"""

# T tokens of a sequence, N read positions, V vocabulary

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from graphseed.capture.driver import Driver
from graphseed.engine.errors import DeviceMemoryError
from graphseed.engine.kv import is_out_of_memory
from graphseed.measure.verify.proof import SequenceReads
from graphseed.models.attention import ATTENTION_NAME
from graphseed.models.experts import choose_experts
from graphseed.models.model import Model

ATTENTION: Final = "sdpa"  # what transformers itself takes by default
EXPERTS: Final = "eager"  # its loop over the experts; the engine runs none of these

# The largest difference of a row's logits, as a share of the row's largest logit. A wrong mask,
# position or weight makes it about 1. Both sides round at other places: paged attention against
# dense, chunks against one forward, other products of matrices for other numbers of rows.
# float32 loses up to about 8 of its 24 bits over a few hundred terms. In half precision each layer
# rounds to 8 (bf16) or 11 bits, and all later layers pass it on: 30 random layers in bf16 were seen
# to reach 0.053, SmolLM2's own weights 0.026.
TOLERANCES: Final = {torch.float32: 2e-4, torch.float16: 0.02, torch.bfloat16: 0.15}
# Two experts that the router likes almost equally change places when its input is rounded
# otherwise, and then that token's layer has another result: no error of either side.
EXPERTS_TOLERANCES: Final = {torch.float32: 2e-4, torch.float16: 0.1, torch.bfloat16: 0.5}


@dataclass(frozen=True, slots=True)
class DifferingToken:
    """A position whose most likely next token is another one in the plain forward."""

    case: str
    position: int
    token: int  # ours
    hf_token: int
    margin: float  # of the plain forward: its best logit less its second best
    gap: float  # of the plain forward: its best logit less that of our token


@dataclass(slots=True)
class AgainstHf:
    """How far the engine's logits are from the plain forward's."""

    tolerance: float
    attention: str
    experts: str | None
    num_rows: int = 0
    largest_share: float = 0.0  # the largest difference of a row over its largest logit
    largest: float = 0.0  # absolute difference
    worst_case: str = ""
    worst_position: int = 0
    tokens: list[DifferingToken] = field(default_factory=list)

    @property
    def is_close(self) -> bool:
        """Whether every row is within the tolerance."""
        return self.largest_share <= self.tolerance

    def as_record(self) -> dict[str, object]:
        """The fields as JSON takes them."""
        return {
            "tolerance": self.tolerance, "attention": self.attention, "experts": self.experts,
            "num_rows": self.num_rows, "is_close": self.is_close,
            "largest_share": self.largest_share, "largest": self.largest,
            "worst_case": self.worst_case, "worst_position": self.worst_position,
            "num_differing_tokens": len(self.tokens),
            "differing_tokens": [
                {
                    "case": t.case, "position": t.position, "token": t.token,
                    "hf_token": t.hf_token, "margin": t.margin, "gap": t.gap,
                }
                for t in self.tokens
            ],
        }  # fmt: skip


def compare_with_hf(
    model: Model,
    driver: Driver,
    reads: Sequence[SequenceReads],
    progress: Callable[[int, int], None] | None = None,
) -> AgainstHf:
    """Run each sequence through the plain forward and compare every row that was read.

    No engine of the model may run meanwhile: its module attends otherwise until this returns.
    `progress` gets the sequences done and in all. Raises DeviceMemoryError.
    """
    experts = choose_experts(model.module, model.device, model.dtype)
    tolerances = TOLERANCES if experts is None else EXPERTS_TOLERANCES
    result = AgainstHf(tolerances[model.dtype], ATTENTION, experts and EXPERTS)
    with _plain(model.module, experts):
        for number, sequence in enumerate(reads):
            if progress is not None:
                progress(number, len(reads))
            _compare(result, sequence, _forward(model, driver, sequence))
    return result


def _forward(model: Model, driver: Driver, sequence: SequenceReads) -> torch.Tensor:
    """The plain logits [N, V] float32, on the host, of the positions that were read."""
    token_ids = torch.tensor([sequence.token_ids], device=model.device)  # [1, T]
    rows = torch.tensor(list(sequence.logits), device=model.device)  # [N]
    try:
        with torch.no_grad():
            output = model.module(input_ids=token_ids, use_cache=False, logits_to_keep=rows)
            logits: torch.Tensor = output.logits[0].float().cpu()
            return logits
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    what = f"a plain forward of {len(sequence.token_ids)} tokens"
    raise DeviceMemoryError(what, None, driver.free_bytes(), "lower --max-tokens")


def _compare(result: AgainstHf, sequence: SequenceReads, plain: torch.Tensor) -> None:
    for (position, ours), theirs in zip(sequence.logits.items(), plain, strict=True):
        largest = float((ours - theirs).abs().max())
        share = largest / max(float(theirs.abs().max()), torch.finfo(torch.float32).tiny)
        result.num_rows += 1
        result.largest = max(result.largest, largest)
        if not share <= result.largest_share:  # also where it is no number
            result.largest_share = share
            result.worst_case, result.worst_position = sequence.case, position
        token, best = int(ours.argmax()), theirs.topk(2)
        if token != int(best.indices[0]):
            top, second = best.values.tolist()
            result.tokens.append(
                DifferingToken(
                    case=sequence.case, position=position, token=token,
                    hf_token=int(best.indices[0]), margin=top - second,
                    gap=top - float(theirs[token]),
                )
            )  # fmt: skip


@contextmanager
def _plain(module: Any, experts: str | None) -> Iterator[None]:
    """Let the module attend, and compute experts, as transformers does; then as it was loaded."""
    module.set_attn_implementation(ATTENTION)
    try:
        if experts is not None:
            module.set_experts_implementation(EXPERTS)
        yield
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
        if experts is not None:
            module.set_experts_implementation(experts)
