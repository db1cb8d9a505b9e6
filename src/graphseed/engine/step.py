"""One step: stage, declare the identity, run it through the cache.

Owns StepRunner: the static logits buffer, and for each shape the identity and the host-pure work
(I11). Positions, lengths and block tables are device data, so one executable serves every position
of every prompt. Does not know requests or sampling.
"""

# T rows of the step, S sequences, V vocabulary, H hidden size

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from graphseed.capture.cache import GraphCache
from graphseed.capture.driver import Driver, Mark
from graphseed.capture.identity import GraphIdentity, Namespace, Plain
from graphseed.engine.config import EngineConfig
from graphseed.engine.kv import KvMemory
from graphseed.engine.plan import Reads, StepPlan
from graphseed.engine.staging import Staging
from graphseed.models.attention import AttentionStep, attention_context
from graphseed.models.kernels.plan import AttentionPlan, plan_attention
from graphseed.models.model import LayerShape, Model

IdentityHook = Callable[[GraphIdentity, StepPlan], GraphIdentity]


class StepObserver(Protocol):
    """Sees each step: for measurements and digests. Must not change what is computed.

    Where a plan reads hidden states, they stand in the place of logits: [T, H] float32.
    """

    def before(self, plan: StepPlan) -> None:
        """Called after staging, before the cache is asked."""

    def after(self, plan: StepPlan, logits: torch.Tensor) -> None:
        """Called when the step was submitted; `logits` [S, V] float32 is valid until the next."""


_ShapeKey = tuple[Namespace, int, int, Reads, tuple[Plain, ...]]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What is built once for each shape of a step."""

    identity: GraphIdentity
    work: Callable[[], None]


class StepRunner:
    """Runs plans on one model and device. Owned by the engine; engine thread only."""

    def __init__(
        self,
        model: Model,
        driver: Driver,
        cache: GraphCache,
        config: EngineConfig,
        kv: KvMemory,
    ) -> None:
        self._model = model
        self._driver = driver
        self._cache = cache
        self._config = config
        self.kv = kv
        self.identity_hook: IdentityHook | None = None  # for tests of what a bad identity costs
        self.staging = Staging(config, model.device, driver)
        # float32: wide enough for every model dtype, so one buffer serves samplers and digests.
        num_rows = config.num_parallel if model.can_generate else 0
        self.logits = torch.zeros(
            num_rows, model.vocab_size, dtype=torch.float32, device=model.device
        )
        rows = config.num_ubatch if config.embeds else 0
        self.hidden = torch.zeros(rows, model.hidden_size, dtype=torch.float32, device=model.device)
        self._shapes: dict[_ShapeKey, _Shape] = {}

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Static buffers of the steps, as bindings."""
        read = (("logits", self.logits.data_ptr()), ("hidden", self.hidden.data_ptr()))
        return (*self.kv.addresses, *self.staging.addresses, *read)

    def run(self, plan: StepPlan, observer: StepObserver | None = None) -> torch.Tensor:
        """Run one plan and return what it reads.

        That is the logits of each part's last token, [S, V] float32, or the hidden states of its
        real rows, [T, H] float32. The result is a static buffer: valid until the next step.
        """
        shape = self._shape(plan)
        identity = shape.identity
        if self.identity_hook is not None:
            identity = self.identity_hook(identity, plan)
        self.staging.stage(plan)
        if observer is not None:
            observer.before(plan)
        self._cache.run(identity, shape.work)
        if plan.reads is Reads.HIDDEN:
            output = self.hidden[: plan.num_tokens]
        else:
            output = self.logits[: len(plan.parts)]
        if observer is not None:
            observer.after(plan, output)
        return output

    def run_direct(self, plan: StepPlan) -> None:
        """Run one plan beside the cache: a warm-up that is no observation."""
        self.staging.stage(plan)
        self._shape(plan).work()

    def _shape(self, plan: StepPlan) -> _Shape:
        key = (plan.namespace, plan.capacity, plan.seq_capacity, plan.reads, _math_settings())
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._build(*key)
        return shape

    def _build(
        self,
        namespace: Namespace,
        capacity: int,
        seq_capacity: int,
        reads: Reads,
        math: tuple[Plain, ...],
    ) -> _Shape:
        model, staging = self._model, self.staging
        plans = tuple(self._plan(layer, capacity, seq_capacity) for layer in model.layers)
        step = AttentionStep(
            kv_indices=staging.view("kv_indices")[:capacity],
            seq_starts=staging.view("seq_starts")[: seq_capacity + 1],
            kv_lens=staging.view("kv_lens")[:seq_capacity],
            block_tables=staging.view("block_tables")[:seq_capacity],
            k_caches=self.kv.k,
            v_caches=self.kv.v,
            plans=plans,
        )
        token_ids = staging.view("token_ids")[:capacity]
        positions = staging.view("positions")[:capacity]
        logits_rows = staging.view("logits_rows")[:seq_capacity]
        logits = self.logits[:seq_capacity]

        def work() -> None:
            with torch.no_grad(), attention_context(step):
                logits.copy_(model.forward(token_ids, positions, logits_rows))

        hidden = self.hidden[:capacity]

        def work_hidden() -> None:
            with torch.no_grad(), attention_context(step):
                hidden.copy_(model.hidden(token_ids, positions))

        structure: tuple[tuple[str, Plain], ...] = (
            ("tokens", capacity),
            ("batch", seq_capacity),
            ("dtype", str(model.dtype).removeprefix("torch.")),
            ("attention", tuple(plan.as_ints() for plan in dict.fromkeys(plans))),
            ("layers", tuple(_plain(layer) for layer in dict.fromkeys(model.layers))),
            ("block_len", self._config.block_len),
            ("max_blocks", self._config.max_blocks),
            ("math", math),
            ("adapters", ()),
            ("reads", reads.value),
        )
        identity = GraphIdentity(
            namespace, self._driver.device, model.first_node(capacity), structure
        )
        return _Shape(identity, work if reads is Reads.LOGITS else work_hidden)

    def _plan(self, layer: LayerShape, capacity: int, seq_capacity: int) -> AttentionPlan:
        max_kv_len = self._config.context_len
        if layer.window:
            max_kv_len = min(max_kv_len, layer.window + capacity)
        return plan_attention(
            num_tokens=capacity,
            num_seqs=seq_capacity,
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            num_sms=self._driver.num_sms,
            max_kv_len=max_kv_len,
        )


def _math_settings() -> tuple[Plain, ...]:
    """Process-wide switches of torch that choose kernels, and so are baked into a recording."""
    return (
        torch._C._get_deterministic_algorithms(),
        torch.get_float32_matmul_precision(),
        str(torch._C._get_cublas_allow_bf16_reduced_precision_reduction()),
        str(torch._C._get_cublas_allow_fp16_reduced_precision_reduction()),
    )


def _plain(layer: LayerShape) -> tuple[Plain, ...]:
    """What of a layer reaches its attention kernel as a plain value."""
    return (
        layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.window, layer.scale,
        layer.soft_cap, layer.has_sinks,
    )  # fmt: skip


class StepTrace:
    """An observer that times each step on the device's clock and keeps its logits.

    Owned by whoever measures; read it when the device is idle.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._marks: list[tuple[Namespace, Mark, Mark]] = []
        self._before: Mark | None = None
        self.logits: list[torch.Tensor] = []

    def before(self, plan: StepPlan) -> None:
        self._before = self._driver.mark(timed=True)

    def after(self, plan: StepPlan, logits: torch.Tensor) -> None:
        if self._before is not None:
            self._marks.append((plan.namespace, self._before, self._driver.mark(timed=True)))
        self.logits.append(logits.clone())

    def step_ms(self, namespace: Namespace) -> list[float]:
        """Milliseconds of each step of a namespace, in order."""
        return [after.ms_since(b) for kind, b, after in self._marks if kind is namespace]
