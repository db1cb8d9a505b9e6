"""The proof of I9 on one model and device: every policy against graphs disabled, byte for byte.

Owns the settings of a proof, its sizes, its rounds, and Verification, the value it ends with. Does
not print; what is compared at a step is `lockstep`'s, which plans are run is `cases`'.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from graphseed.capture.driver import Driver
from graphseed.capture.errors import DeviceLost
from graphseed.capture.identity import Namespace
from graphseed.capture.tally import Counts
from graphseed.engine.config import EngineConfig
from graphseed.engine.errors import BadParameter, DeviceMemoryError
from graphseed.engine.kv import KvMemory, bytes_per_token, is_out_of_memory
from graphseed.measure.policies import POLICIES
from graphseed.measure.session import Session
from graphseed.measure.verify.case_plans import Planner, Step
from graphseed.measure.verify.cases import ROOM, Case, Release, Sizes, kv_len_of, make_cases
from graphseed.measure.verify.differences import Difference
from graphseed.measure.verify.lockstep import JUNK, REFERENCE_JUNK, Lockstep, Place, Side
from graphseed.models.model import Model

REFERENCE: Final = "disabled"
REPLAYING: Final = ("seed", "resident")  # policies that capture prompt graphs
POLICY_NAMES: Final = tuple(name for name in POLICIES if name != REFERENCE)
NUM_LISTED: Final = 20  # differences that are kept; the rest are counted
_ADVICE: Final = "lower --max-tokens, -ub or -np, or verify fewer --policies at once"


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """What a proof is asked for. Raises BadParameter for a value out of range."""

    policies: tuple[str, ...] = POLICY_NAMES
    max_tokens: int = 2048  # of the longest prompt; less where the context is shorter
    num_rounds: int = 3
    num_ubatch: int = 512
    num_parallel: int = 4
    context_len: int = 0  # 0: as long as the longest sequence
    seed: int = 0  # of the tokens
    keeps_reads: bool = False  # whether the reference's logits are kept, for another comparison

    def __post_init__(self) -> None:
        names = self.policies
        if not names or len(set(names)) != len(names) or not set(names) <= set(POLICY_NAMES):
            expected = f"one or more of {', '.join(POLICY_NAMES)}, comma-separated"
            raise BadParameter("--policies", ",".join(names), expected)
        if self.max_tokens < 2:
            raise BadParameter("--max-tokens", self.max_tokens, "at least 2")
        if self.num_rounds < 2:
            expected = "at least 2: the first seeds, later ones replay"
            raise BadParameter("--rounds", self.num_rounds, expected)
        if self.num_ubatch < 1:
            raise BadParameter("-ub", self.num_ubatch, "at least 1")
        if self.num_parallel < 1:
            raise BadParameter("-np", self.num_parallel, "at least 1")
        if self.context_len and self.context_len < 2 + ROOM:
            raise BadParameter("-c", self.context_len, f"0 or at least {2 + ROOM}")
        if self.seed < 0:
            raise BadParameter("--seed", self.seed, "0 or more")


@dataclass(frozen=True, slots=True)
class SequenceReads:
    """One sequence of the first round and the logits read of it, with graphs disabled."""

    case: str
    token_ids: tuple[int, ...]
    logits: dict[int, torch.Tensor]  # by position: [V] float32, on the host


@dataclass(slots=True)
class CaseResult:
    """One case over all rounds."""

    name: str
    num_observations: int = 0  # steps, of each policy
    # By policy, the reference's too: the last round's logits, then KV rows. Empty: it never ran.
    digests: dict[str, str] = field(default_factory=dict)
    differing: set[str] = field(default_factory=set)  # policies


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What one policy's cache did over the whole proof."""

    counts: dict[Namespace, Counts]
    num_identities: dict[Namespace, int]
    num_replayed_identities: dict[Namespace, int]
    refusals: dict[Namespace, tuple[str, ...]]  # where, reason and detail; each once


@dataclass(slots=True)
class Verification:
    """How a proof ended."""

    settings: VerifySettings
    config: EngineConfig
    cases: list[CaseResult] = field(default_factory=list)
    policies: dict[str, PolicyResult] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)  # the first NUM_LISTED
    num_differences: int = 0
    num_steps: int = 0  # plans, each of which ran once with graphs disabled and under each policy
    reads: list[SequenceReads] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether every byte that was compared is equal."""
        return not self.num_differences

    def unproven(self) -> dict[tuple[str, Namespace], tuple[str, ...]]:
        """Where a policy should have replayed and did not, with the refusals that explain it."""
        found = {}
        for name, result in self.policies.items():
            for namespace in Namespace:
                is_due = namespace is Namespace.DECODE or name in REPLAYING
                is_seen = bool(result.num_identities[namespace])
                if is_due and is_seen and not result.counts[namespace].replayed:
                    found[name, namespace] = result.refusals[namespace]
        return found

    def findings(self) -> list[str]:
        """What is wrong; empty when the proof holds, or could not be made for stated reasons."""
        found = []
        if self.num_differences:
            found.append(f"{self.num_differences} differences from graphs disabled")
        for (name, namespace), refusals in self.unproven().items():
            if not refusals:
                graph = f"{namespace.value} graph"
                found.append(f"policy {name} replayed no {graph} and refused none: nothing proven")
        return found


@dataclass(frozen=True, slots=True)
class Progress:
    """Which case begins, of how many in all rounds."""

    case: str
    round_number: int
    num_done: int
    num_cases: int


def verify(
    model: Model,
    driver: Driver,
    settings: VerifySettings,
    progress: Callable[[Progress], None] | None = None,
) -> Verification:
    """Run every case in every round under all policies side by side, and compare.

    Goes on after a difference. `progress` is called before each case. Raises BadParameter,
    DeviceMemoryError, NotFinite, DeviceLost.
    """
    sizes, config, cases = _sized(model, settings)
    _check_memory(model, driver, config, len(settings.policies) + 1)
    result = Verification(settings, config, [CaseResult(case.name) for case in cases])
    with _guarded(driver), ExitStack() as stack:
        lockstep = _open(model, driver, config, settings.policies, stack)
        runs = [
            (number, index)
            for number in range(1, settings.num_rounds + 1)
            for index, case in enumerate(cases)
            if not case.is_releasing or number % 2 == 0
        ]
        for num_done, (number, index) in enumerate(runs):
            if progress is not None:
                progress(Progress(cases[index].name, number, num_done, len(runs)))
            _run_case(lockstep, cases[index], index, number, result)
        for side in lockstep.sides[1:]:
            result.policies[side.name] = _policy_result(side)
    return result


def _sized(model: Model, settings: VerifySettings) -> tuple[Sizes, EngineConfig, tuple[Case, ...]]:
    block_len = EngineConfig().block_len
    room = min(model.context_len, settings.context_len or model.context_len) - ROOM
    longest = min(settings.max_tokens, room)
    if longest < 2:
        raise BadParameter("-c", settings.context_len, f"at least {2 + ROOM}")
    sizes = Sizes(longest, settings.num_ubatch, settings.num_parallel, block_len)
    cases = make_cases(sizes)
    context_len = settings.context_len or longest + ROOM
    config = EngineConfig(
        context_len=context_len, num_ubatch=settings.num_ubatch,
        num_parallel=settings.num_parallel, block_len=block_len,
        # A block more: the warm-up takes one, and a full pool would hide a wrong block number.
        kv_len=max(context_len, kv_len_of(cases, sizes)) + block_len,
    )  # fmt: skip
    return sizes, config, cases


def _check_memory(model: Model, driver: Driver, config: EngineConfig, num_sessions: int) -> None:
    """Raise DeviceMemoryError before anything is allocated: sessions live side by side."""
    per_token = bytes_per_token(model.layers, model.dtype)
    num_bytes = (num_sessions + 2) * config.num_blocks * config.block_len * per_token
    free_bytes = driver.free_bytes()
    if num_bytes > free_bytes:
        what = f"KV memory of {num_sessions} policies and what is expected of them"
        raise DeviceMemoryError(what, num_bytes, free_bytes, _ADVICE)


def _open(
    model: Model, driver: Driver, config: EngineConfig, policies: Sequence[str], stack: ExitStack
) -> Lockstep:
    sides = []
    for name in (REFERENCE, *policies):
        session = stack.enter_context(Session(model, driver, config, POLICIES[name]))
        session.core.warm_up()
        sides.append(Side(name, session, REFERENCE_JUNK if name == REFERENCE else JUNK))
    expected = [
        KvMemory(
            model.layers, config.num_blocks, config.block_len, model.dtype, model.device,
            driver.free_bytes(),
        )
        for _ in range(2)
    ]  # fmt: skip
    return Lockstep(sides, *expected)


def _run_case(
    lockstep: Lockstep, case: Case, index: int, round_number: int, result: Verification
) -> None:
    row, settings = result.cases[index], result.settings
    reference = lockstep.sides[0].session
    lockstep.begin_case()
    reads: dict[int, dict[int, torch.Tensor]] = {}
    seed = [settings.seed, round_number, index]
    with Planner(reference, case, reference.core.model.vocab_size, seed) as planner:
        for step_number, step in enumerate(planner.steps(), 1):
            if isinstance(step, Release):
                for side in lockstep.sides:
                    side.session.core.cache.release(Namespace.PROMPT)
                continue
            found = lockstep.run(step, Place(case.name, round_number, step_number))
            row.num_observations += 1
            row.differing |= {difference.policy for difference in found}
            result.differences += found[: max(0, NUM_LISTED - len(result.differences))]
            result.num_differences += len(found)
            result.num_steps += 1
            if settings.keeps_reads and round_number == 1:
                _keep(reads, step, reference)
        if round_number + (2 if case.is_releasing else 1) > settings.num_rounds:  # its last
            lockstep.add_kv_to_digests(planner.kv_indices())
        for sequence, token_ids in planner.token_ids().items():
            if sequence in reads:
                result.reads.append(SequenceReads(case.name, token_ids, reads[sequence]))
    for side in lockstep.sides:
        side.session.settle()
        row.digests[side.name] = side.sha.hexdigest()


def _keep(reads: dict[int, dict[int, torch.Tensor]], step: Step, reference: Session) -> None:
    logits = reference.core.runner.logits
    for row, (part, sequence) in enumerate(zip(step.plan.parts, step.sequences, strict=True)):
        reads.setdefault(sequence, {})[part.kv_len - 1] = logits[row].cpu().clone()


def _policy_result(side: Side) -> PolicyResult:
    answers = side.answers

    def num(namespace: Namespace, is_replayed: bool) -> int:
        among = answers.replayed if is_replayed else answers.seen
        return sum(identity.namespace is namespace for identity in among)

    return PolicyResult(
        # Copies: what is released when the session is closed is no part of the proof.
        counts={n: replace(held) for n, held in side.session.core.tally.counts.items()},
        num_identities={n: num(n, False) for n in Namespace},
        num_replayed_identities={n: num(n, True) for n in Namespace},
        refusals={n: tuple(said) for n, said in answers.refusals.items()},
    )


@contextmanager
def _guarded(driver: Driver) -> Iterator[None]:
    """Turn what a device can do wrong into errors of ours."""
    try:
        yield
        return
    except DeviceMemoryError:
        raise
    except (RuntimeError, MemoryError) as error:
        if driver.is_lost(error):
            raise DeviceLost(f"the device was lost: {error}; start a new process") from error
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
    # Raised out of the except block: the original's traceback would keep the tensors.
    raise DeviceMemoryError("verifying policies side by side", None, driver.free_bytes(), _ADVICE)
