"""What a benchmark found: one test under every policy, as values.

Owns BenchRow and PolicyFigures, the ratios between policies, and which decode stands beside a
prompt. Measures nothing and does not print.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from graphseed.measure.bench.grid import BenchTest

BASELINE: Final = "off"  # the policy that every multiple is of

Digest = tuple[str, str]  # of logits, of K/V


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One row under one policy. Of a row's namespaces: the prompt's, the decode's, or both."""

    policy: str
    num_tokens: int  # of one repetition
    prompt_ms: tuple[float, ...]  # of each repetition; empty where no prompt was timed
    decode_ms: tuple[float, ...]  # of each repetition; a prompt row's are of another decode
    hit_rate: float  # observations replayed, of those timed: the prompt's, or a decode row's
    num_seeds: int  # captures, every time counted
    capture_ms: float  # to capture each graph once
    instantiate_ms: float
    num_bytes: int  # that graphs held at most
    refusals: tuple[str, ...]
    digests: tuple[Digest, ...]  # of each digested repetition: other tokens, other bytes
    is_decode_own: bool = True  # whether `decode_ms` is part of the repetition

    @property
    def samples_ms(self) -> tuple[float, ...]:
        """Milliseconds of each whole repetition."""
        if not self.prompt_ms or not self.is_decode_own:
            return self.prompt_ms or self.decode_ms
        if not self.decode_ms:
            return self.prompt_ms
        return tuple(map(sum, zip(self.prompt_ms, self.decode_ms, strict=True)))

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple(1e3 * self.num_tokens / ms for ms in self.samples_ms)


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One test under every policy."""

    test: BenchTest
    started: datetime
    figures: Mapping[str, PolicyFigures]  # by policy, in order
    floor_ms: float  # the least that a repetition can take
    decode_of: str  # which decode the ratio is of: "tg128", "tg16 after the prompt"
    is_side_by_side: bool  # False: memory sufficed for one policy at a time only

    def prompt_multiple(self, policy: str) -> float | None:
        """How many times as fast as the baseline the prompt ran, by medians; None without one."""
        return _ratio(self.figures[BASELINE].prompt_ms, self.figures[policy].prompt_ms)

    def decode_ratio(self, policy: str) -> float | None:
        """How many times as fast as the baseline the decode ran, by medians."""
        return _ratio(self.figures[BASELINE].decode_ms, self.figures[policy].decode_ms)

    def ceiling_share(self, policy: str) -> float:
        """The least time that the measured rates allow, as a share of the median."""
        return self.floor_ms / statistics.median(self.figures[policy].samples_ms)

    @property
    def differences(self) -> tuple[str, ...]:
        """Policies some bytes of which are not the baseline's; "logits", "K/V"."""
        baseline = self.figures[BASELINE].digests
        found = []
        for name, figures in self.figures.items():
            pairs = list(zip(figures.digests, baseline, strict=True))
            for part, what in enumerate(("logits", "K/V")):
                if any(own[part] != other[part] for own, other in pairs):
                    found.append(f"{what} under {name}")
        return tuple(found)

    @property
    def is_equal(self) -> bool:
        """Whether all bytes are the same under all policies."""
        return not self.differences


def mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); 0 for a single value."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), sd


def with_decode_beside(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows of one group, each prompt row with the decode of the group's longest decode row.

    Rows that were measured with a decode of their own keep it.
    """
    decodes = [row for row in rows if not row.test.prompt_len]
    if not decodes:
        return list(rows)
    beside = max(decodes, key=lambda row: row.test.new_len)
    done = []
    for row in rows:
        if any(figures.decode_ms for figures in row.figures.values()):
            done.append(row)
            continue
        figures = {
            name: replace(own, decode_ms=beside.figures[name].decode_ms, is_decode_own=False)
            for name, own in row.figures.items()
        }
        done.append(replace(row, figures=figures, decode_of=beside.test.name))
    return done


def _ratio(baseline: Sequence[float], measured: Sequence[float]) -> float | None:
    if not baseline or not measured:
        return None
    ratio = statistics.median(baseline) / statistics.median(measured)
    return ratio if math.isfinite(ratio) else None
