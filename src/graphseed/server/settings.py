"""What a server is told, checked once.

Owns ServerSettings. The engine's sizes are EngineConfig's, the policy is Selection's. Does not
parse arguments.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from graphseed.engine import BadParameter, Pooling, SamplingParams

ON_OFF_AUTO: Final = frozenset({"on", "off", "auto"})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One server's switches, as llama-server names them. Raises BadParameter."""

    host: str = "127.0.0.1"
    port: int = 8080
    aliases: tuple[str, ...] = ()  # names the model answers to; empty: its own
    tags: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()  # empty: everybody may
    cors_origins: tuple[str, ...] = ()  # empty: as llama-server, whoever asks
    num_predict: int = -1  # -n: new tokens where a request does not say
    has_metrics: bool = False
    has_slots: bool = True
    has_props: bool = False  # POST /props
    has_ui: bool = True
    embeds: bool = False
    pooling: Pooling = Pooling.MEAN
    uses_jinja: bool = True
    reasoning: str = "auto"  # on, off or auto: whether a chat template may begin a thought
    reasoning_format: str = "auto"  # deepseek, none or auto, where a request does not say
    chat_template: str | None = None  # in place of the model's own
    caches_prompts: bool = True
    shifts_context: bool = False
    slot_save_path: Path | None = None
    sleep_idle_seconds: float = -1.0  # -1: never
    timeout_seconds: float = 3600.0  # of one request
    sse_ping_seconds: float = 30.0
    max_body_bytes: int = 64 << 20
    logs_prompts: bool = False
    is_verbose: bool = False  # answers have __verbose where a request does not say
    defaults: SamplingParams = field(default_factory=SamplingParams)  # where a request does not say

    def __post_init__(self) -> None:
        ping = self.sse_ping_seconds
        for name, value, is_good, expected in (
            ("port (--port)", self.port, 0 <= self.port <= 65535, "0 (any) to 65535"),
            ("-n", self.num_predict, self.num_predict >= -1, "-1 (no limit) or more"),
            ("--timeout", self.timeout_seconds, self.timeout_seconds > 0, "above 0"),
            ("--sse-ping-interval", ping, ping > 0 or ping == -1, "above 0, or -1 (no pings)"),
            ("--reasoning", self.reasoning, self.reasoning in ON_OFF_AUTO, "on, off or auto"),
            ("--api-key", "an empty key", all(self.api_keys), "keys of at least 1 character"),
        ):
            if not is_good:
                raise BadParameter(name, value, expected)
