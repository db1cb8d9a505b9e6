"""Reading the selectors, and the registry of which were read.

Owns Policy, Selection and read_selectors. A value that means nothing is an error at start, never a
guess; what defeats or overrides a selector is named (I10, I12). Does not know a device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from graphseed.capture.errors import SelectorError

SEED_VARIABLE: Final = "GGML_CUDA_PROMPT_GRAPH_CAPTURE_SEED"
DISABLE_VARIABLE: Final = "GGML_CUDA_DISABLE_GRAPHS"
FLAG: Final = "--prompt-graphs"
ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Policy(Enum):
    """When graphs of a namespace are captured."""

    OFF = "off"
    SEED = "seed"  # at the first observation, before its direct run
    RESIDENT = "resident"  # at the first observation direct only; captured in settle()


@dataclass(frozen=True, slots=True)
class Selection:
    """What the selectors resolved to, and why."""

    prompt: Policy = Policy.OFF
    decode: Policy = Policy.SEED
    source: str = "default"  # what selected the prompt policy
    was_asked: bool = False  # whether anybody asked for prompt graphs
    read: tuple[tuple[str, str | None], ...] = ()  # every selector looked at, with its raw value
    warnings: tuple[str, ...] = ()

    @property
    def are_graphs_disabled(self) -> bool:
        """Whether no graph of any kind is captured (I12)."""
        return self.prompt is Policy.OFF and self.decode is Policy.OFF


def read_selectors(environ: Mapping[str, str], flag: str | None = None) -> Selection:
    """Resolve the environment and the value of `--prompt-graphs` (None: not given).

    Raises SelectorError for a value that means nothing.
    """
    raw_seed, raw_disable = environ.get(SEED_VARIABLE), environ.get(DISABLE_VARIABLE)
    read: list[tuple[str, str | None]] = [
        (FLAG, flag),
        (SEED_VARIABLE, raw_seed),
        (DISABLE_VARIABLE, raw_disable),
    ]
    read += [(name, environ[name]) for name in ALLOCATOR_VARIABLES if name in environ]
    from_env = _policy_of_variable(raw_seed)
    from_flag = _policy_of_flag(flag)
    warnings: list[str] = []
    if from_flag is not None:
        policy, source = from_flag, f"{FLAG} {from_flag.value}"
        if from_env is not None and from_env is not from_flag:
            warnings.append(
                f"{SEED_VARIABLE}={raw_seed} asks for {from_env.value} and {FLAG} for "
                f"{from_flag.value}: the flag wins"
            )
    elif from_env is not None:
        policy, source = from_env, f"{SEED_VARIABLE}={raw_seed}"
    else:
        policy, source = Policy.OFF, "default"
    was_asked = policy is not Policy.OFF
    warnings += _allocator_warnings(environ)
    decode = Policy.SEED
    if raw_disable is not None:
        if was_asked:
            warnings.append(
                f"{source} has no effect: {DISABLE_VARIABLE} is set (to {raw_disable!r}; any value "
                "counts), which turns every graph off, decode too"
            )
        policy, decode, source = Policy.OFF, Policy.OFF, DISABLE_VARIABLE
    return Selection(policy, decode, source, was_asked, tuple(read), tuple(warnings))


def _policy_of_variable(raw: str | None) -> Policy | None:
    match raw:
        case None:
            return None
        case "1":
            return Policy.SEED
        case "0":
            return Policy.OFF
        case _:
            raise SelectorError(
                f"{SEED_VARIABLE}={raw!r} means nothing; expected 1 (seed) or 0 (off). Unset it, "
                f"or use {FLAG} off|seed|resident"
            )


def _policy_of_flag(raw: str | None) -> Policy | None:
    if raw is None:
        return None
    try:
        return Policy(raw)
    except ValueError:
        names = ", ".join(policy.value for policy in Policy)
        raise SelectorError(f"{FLAG} {raw!r} means nothing; expected one of {names}") from None


def _allocator_warnings(environ: Mapping[str, str]) -> list[str]:
    # With this backend memory is taken inside the graph as allocation nodes: nothing can be
    # captured into a pool of ours, so every seed would be refused.
    return [
        f"{name}={environ[name]} selects the cudaMallocAsync allocator, which defeats graph "
        "capture; unset it"
        for name in ALLOCATOR_VARIABLES
        if "cudamallocasync" in environ.get(name, "").lower()
    ]
