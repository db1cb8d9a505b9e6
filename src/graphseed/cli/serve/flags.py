"""`graphseed serve`: its flags and environment variables, read as llama-server reads its own.

Owns ServeArgs and how a command line becomes one: a flag beats its variable, switches take no
value, any word after a flag that has one is the value, and what is not known is an error in
llama-server's words. Which flags there are is table's. Does not know what values mean.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

from graphseed.capture import GraphseedError
from graphseed.cli.serve.table import USED, Flag, Kind, Other
from graphseed.cli.serve.unused import IGNORED, REFUSED

_TRUE: Final = frozenset({"true", "1", "on", "enabled"})
_FALSE: Final = frozenset({"false", "0", "off", "disabled"})
_HELP: Final = frozenset({"-h", "--help", "--usage"})


class BadUsage(GraphseedError):
    """The command line or a variable is not understood."""


@dataclass(slots=True)
class ServeArgs:
    """What the flags say. The names are table's keys."""

    model: str = ""
    hf_repo: str = ""
    hf_file: str = ""
    hf_token: str = ""
    is_offline: bool = False
    device: str = "auto"
    gpu_layers: str = "auto"
    main_gpu: int = -1
    dtype: str = "auto"
    threads: int = -1
    ctx_size: int = 0
    batch_size: int = 2048
    ubatch_size: int = 512
    parallel: int = -1
    is_unified: bool | None = None
    prompt_graphs: str | None = None
    record_plans: str = ""
    max_waiting: int = 1024
    host: str = "127.0.0.1"
    port: int = 8080
    reuses_port: bool = False
    api_prefix: str = ""
    ssl_key_file: str = ""
    ssl_cert_file: str = ""
    alias: str = ""
    tags: str = ""
    api_key: list[str] = field(default_factory=list)
    api_key_file: str = ""
    cors_origins: str | None = None
    limits_origins: bool = False
    predict: int = -1
    has_metrics: bool = False
    has_slots: bool = True
    has_props: bool = False
    has_ui: bool = True
    embeds: bool = False
    pooling: str = "mean"
    uses_jinja: bool = True
    reasoning: str = "auto"
    reasoning_format: str = "auto"
    chat_template: str = ""
    chat_template_file: str = ""
    caches_prompts: bool = True
    slot_save_path: str = ""
    sleep_idle_seconds: int = -1
    timeout: int = 3600
    sse_ping_interval: int = 30
    max_body_bytes: int = 64 << 20
    drain_seconds: float = 3.0
    seed: int = -1
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    ignores_eos: bool = False
    logs_prompts: bool = False
    is_verbose: bool = False
    verbosity: int = 3
    log_file: str = ""
    logs_nothing: bool = False
    lists_devices: bool = False
    tells_version: bool = False
    notes: list[str] = field(default_factory=list)  # what was given and means nothing here


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Describe every flag, for --help."""
    for flag in USED:
        add: Callable[..., Any] = parser.add_argument
        told = f"{flag.help} [{flag.env}]" if flag.env else flag.help
        names = (*flag.names, *flag.off_names)
        if flag.kind is Kind.SWITCH:
            add(*names, action="store_true", dest=flag.key, help=told)
        else:
            add(*names, metavar=flag.metavar, dest=flag.key, help=told)
    parser.usage = "%(prog)s [-m MODEL] [FLAG ...]"
    parser.epilog = (
        "Every other flag of llama-server is known too: one that means nothing here is accepted "
        "and says so, one that this server cannot honour is refused."
    )


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> ServeArgs:
    """Read a command line over the environment. Raises BadUsage."""
    args = ServeArgs()
    _read_environment(args, environ)
    port = _cloud_port(environ)
    given: set[str] = set()  # keys that the command line has set
    words = list(argv)
    while words:
        name = words.pop(0)
        flag, is_off = _FLAGS.get(name, (None, False))
        other = _OTHERS.get(name)
        if flag is None and other is None:
            raise BadUsage(f"invalid argument: {name}")
        if flag is not None and flag.kind is Kind.SWITCH:
            _set(args, flag, not is_off)
            continue
        num_values = 1 if other is None else other.num_values
        if len(words) < num_values:
            raise BadUsage(f"{name} needs a value; none was given")
        values, words = words[:num_values], words[num_values:]
        if other is not None:
            _take_other(args, other, name)
        elif flag is not None:
            if flag.kind is Kind.LIST and flag.key not in given:
                getattr(args, flag.key).clear()  # the variable's
            given.add(flag.key)
            _set(args, flag, _value(flag, name, values[0]))
    if port is not None:
        args.port = port
    return args


def wants_help(argv: Iterable[str]) -> bool:
    """Whether help is asked for."""
    return not _HELP.isdisjoint(argv)


def _read_environment(args: ServeArgs, environ: Mapping[str, str]) -> None:
    for flag in USED:
        if not flag.env:
            continue
        if flag.kind is Kind.SWITCH:
            if flag.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_") in environ and flag.off_names:
                _set(args, flag, False)
            elif flag.env in environ:
                _set(args, flag, _truth(flag.env, environ[flag.env]))
        elif flag.env in environ:
            _set(args, flag, _value(flag, flag.env, environ[flag.env]))
    for other in (*IGNORED, *REFUSED):
        if other.env and environ.get(other.env):
            _take_other(args, other, other.env)


def _cloud_port(environ: Mapping[str, str]) -> int | None:
    """Where Google's prediction service wants it to listen, whatever the flags say."""
    if environ.get("AIP_MODE") != "PREDICTION":
        return None
    name = "AIP_HTTP_PORT"
    flag = next(flag for flag in USED if flag.key == "port")
    return int(_value(flag, name, environ.get(name, "8080")))


def _take_other(args: ServeArgs, other: Other, name: str) -> None:
    if other.is_refused:
        raise BadUsage(f"{name} cannot be honoured: {other.why}")
    args.notes.append(f"{name} means nothing here: {other.why}")
    if other.limits_origins:
        args.limits_origins = True


def _set(args: ServeArgs, flag: Flag, value: object) -> None:
    if flag.kind is Kind.LIST:
        getattr(args, flag.key).append(value)
    else:
        setattr(args, flag.key, value)


def _value(flag: Flag, name: str, text: str) -> str | int | float:
    expected = "a whole number" if flag.kind is Kind.WHOLE else "a number"
    try:
        match flag.kind:
            case Kind.WHOLE:
                return int(text)
            case Kind.NUMBER if isfinite(float(text)):
                return float(text)
            case Kind.NUMBER:
                raise BadUsage(f"{name} is {text!r}; expected {expected}")
            case _:
                return text
    except ValueError:
        raise BadUsage(f"{name} is {text!r}; expected {expected}") from None


def _truth(name: str, text: str) -> bool:
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    expected = f"one of {', '.join(sorted(_TRUE | _FALSE))}"
    raise BadUsage(f"{name} is {text!r}; expected {expected}")


_FLAGS: Final[dict[str, tuple[Flag, bool]]] = {
    **{name: (flag, False) for flag in USED for name in flag.names},
    **{name: (flag, True) for flag in USED for name in flag.off_names},
}
_OTHERS: Final[dict[str, Other]] = {
    name: other for other in (*IGNORED, *REFUSED) for name in other.names
}
