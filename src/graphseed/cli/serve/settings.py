"""What the flags of `graphseed serve` come to: settings, sizes, a device, a model's name.

Owns the translation, and every check that needs no model. Does not load anything.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from graphseed.cli.options import parse_bias
from graphseed.cli.serve.flags import ServeArgs
from graphseed.engine import BadParameter, EngineConfig, Pooling, SamplingParams
from graphseed.engine.config import resolve
from graphseed.engine.kv import bytes_per_token
from graphseed.server.auth import LOCALHOST
from graphseed.server.conversation.chat_template import check_template
from graphseed.server.listen import ListenOptions
from graphseed.server.settings import ServerSettings
from graphseed.server.wire.params import RANDOM_SEED

if TYPE_CHECKING:
    from graphseed.capture import Driver
    from graphseed.models.model import Model

DEFAULT_MODEL: Final = "smollm2"
AUTO_PARALLEL: Final = 4  # as llama-server's -np -1
_SMALLEST_P: Final = 1e-9  # a top_p of 0: the most likely token alone


def server_settings(args: ServeArgs) -> ServerSettings:
    """The server's switches. Raises BadParameter, also for files that cannot be read."""
    idle, prefix = args.sleep_idle_seconds, args.api_prefix
    for name, value, is_good, expected in (
        ("--sleep-idle-seconds", idle, idle == -1 or idle > 0, "-1 (never) or above 0"),
        ("--max-body-bytes", args.max_body_bytes, args.max_body_bytes > 0, "above 0"),
        ("--api-prefix", prefix, _is_prefix(prefix), "/PATH without a / at the end"),
    ):  # fmt: skip
        if not is_good:
            raise BadParameter(name, value, expected)
    if idle > 0 and args.record_plans:
        expected = "no --sleep-idle-seconds: each waking begins the file anew"
        raise BadParameter("--record-plans", args.record_plans, expected)
    if args.slot_save_path and args.record_plans:
        expected = (
            "no --slot-save-path: K/V out of a slot file is in no plan, so no replay proves it"
        )
        raise BadParameter("--record-plans", args.record_plans, expected)
    return ServerSettings(
        host=args.host,
        port=args.port,
        aliases=_listed(args.alias),
        tags=_listed(args.tags),
        api_keys=_api_keys(args),
        cors_origins=_origins(args),
        num_predict=args.predict,
        has_metrics=args.has_metrics,
        has_slots=args.has_slots,
        has_props=args.has_props,
        has_ui=args.has_ui,
        embeds=args.embeds,
        pooling=_pooling(args.pooling),
        uses_jinja=args.uses_jinja,
        reasoning=args.reasoning,
        reasoning_format=args.reasoning_format,
        chat_template=_chat_template(args),
        caches_prompts=args.caches_prompts,
        slot_save_path=_folder(args.slot_save_path),
        sleep_idle_seconds=float(idle),
        timeout_seconds=float(args.timeout),
        sse_ping_seconds=float(args.sse_ping_interval),
        max_body_bytes=args.max_body_bytes,
        logs_prompts=args.logs_prompts,
        is_verbose=args.is_verbose,
        defaults=_sampling(args),
    )


def listen_options(args: ServeArgs) -> ListenOptions:
    """How it listens and ends. Raises BadParameter."""
    if args.drain_seconds < 0:
        raise BadParameter("--drain-seconds", args.drain_seconds, "0 or more")
    if bool(args.ssl_key_file) != bool(args.ssl_cert_file):
        given = args.ssl_key_file or args.ssl_cert_file
        raise BadParameter("TLS", given, "both --ssl-key-file and --ssl-cert-file")
    for name, path in (
        ("--ssl-key-file", args.ssl_key_file), ("--ssl-cert-file", args.ssl_cert_file),
    ):  # fmt: skip
        if path and not Path(path).is_file():
            raise BadParameter(name, path, "a file")
    return ListenOptions(
        args.drain_seconds,
        Path(args.ssl_key_file) if args.ssl_key_file else None,
        Path(args.ssl_cert_file) if args.ssl_cert_file else None,
    )


def planned_config(args: ServeArgs) -> EngineConfig:
    """The engine's sizes, as far as they do not depend on the model. Raises BadParameter.

    As llama.cpp has it, -c is what all slots have together: each has its share, or with
    --kv-unified may use all of it.
    """
    if args.parallel < -1 or args.parallel == 0:
        raise BadParameter("-np", args.parallel, "-1 (automatic) or at least 1")
    if args.batch_size < 1:
        raise BadParameter("-b", args.batch_size, "at least 1")
    if args.ctx_size < 0:
        raise BadParameter("-c", args.ctx_size, "0 (the model's) or more")
    num_slots = AUTO_PARALLEL if args.parallel == -1 else args.parallel
    is_unified = args.parallel == -1 if args.is_unified is None else args.is_unified
    context_len = args.ctx_size if is_unified else args.ctx_size // num_slots
    if args.ctx_size and context_len < 2:
        raise BadParameter("-c", args.ctx_size, f"at least 2 tokens for each of {num_slots} slots")
    return EngineConfig(
        context_len=context_len,
        num_ubatch=min(args.batch_size, args.ubatch_size),
        num_parallel=num_slots,
        kv_len=args.ctx_size if is_unified else 0,
        reuses_prefixes=args.caches_prompts,
        max_waiting=args.max_waiting,
        embeds=args.embeds,
    )


def engine_config(args: ServeArgs, model: "Model", driver: "Driver") -> EngineConfig:
    """The engine's sizes; without -c the slots share what the model was trained for, if it fits."""
    planned = planned_config(args)
    if planned.context_len:
        return planned
    whole = resolve(
        EngineConfig(),
        model_context_len=model.context_len,
        kv_bytes_per_token=bytes_per_token(model.layers, model.dtype),
        free_bytes=driver.free_bytes(),
    ).context_len
    args.ctx_size = max(whole, 2 * planned.num_parallel)
    return planned_config(args)


def device_of(args: ServeArgs) -> str:
    """graphseed's name for the device that the flags name. Raises BadParameter."""
    layers = args.gpu_layers
    if layers not in ("auto", "all") and not layers.removeprefix("-").isdecimal():
        raise BadParameter("-ngl", layers, "auto, all or a number")
    name = args.device.lower()
    if "," in name:
        raise BadParameter("--device", args.device, "one device: the whole model runs on it")
    if name == "none" or (name == "auto" and layers == "0"):
        return "cpu"
    if name.startswith("cuda") and name[4:].isdecimal():  # llama.cpp's CUDA0
        return f"cuda:{name[4:]}"
    if name == "auto" and args.main_gpu >= 0:
        return f"cuda:{args.main_gpu}"
    return name


def model_of(args: ServeArgs) -> str:
    """The model's name as the user gave it. Raises BadParameter."""
    if args.hf_file and not args.hf_repo:
        raise BadParameter("--hf-file", args.hf_file, "--hf-repo with it")
    repo = args.hf_repo.partition(":")[0]  # :QUANT picks a file there; here --hf-file does
    if args.model:
        return args.model
    return f"{repo}/{args.hf_file}" if args.hf_file else repo or DEFAULT_MODEL


def _sampling(args: ServeArgs) -> SamplingParams:
    try:
        biases = tuple(parse_bias(text) for text in args.logit_bias)
    except argparse.ArgumentTypeError as error:
        raise BadParameter("--logit-bias", args.logit_bias, str(error)) from None
    return SamplingParams(
        temperature=max(0.0, args.temperature),
        top_k=max(0, args.top_k),
        top_p=min(1.0, max(_SMALLEST_P, args.top_p)),
        min_p=max(0.0, args.min_p),
        seed=RANDOM_SEED if args.seed == -1 else args.seed,
        max_tokens=args.predict if args.predict > 0 else -1,
        typical_p=min(1.0, max(_SMALLEST_P, args.typical)),
        repeat_last_n=args.repeat_last_n,
        repeat_penalty=args.repeat_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=biases,
        stop=tuple(args.stop),
        ignore_eos=args.ignores_eos,
    )


def _pooling(text: str) -> Pooling:
    try:
        return Pooling(text)
    except ValueError:
        names = ", ".join(pooling.value for pooling in Pooling)
        raise BadParameter("--pooling", text, f"one of {names}") from None


def _api_keys(args: ServeArgs) -> tuple[str, ...]:
    keys = [key.strip() for given in args.api_key for key in given.split(",")]
    if args.api_key_file:
        lines = _read("--api-key-file", args.api_key_file).splitlines()
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:  # or else everybody might
            raise BadParameter("--api-key-file", args.api_key_file, "a file with a key in it")
        keys += found
    return tuple(keys)


def _origins(args: ServeArgs) -> tuple[str, ...]:
    if args.cors_origins is not None:
        return _listed(args.cors_origins)
    return (LOCALHOST,) if args.limits_origins else ()


def _chat_template(args: ServeArgs) -> str | None:
    template = args.chat_template
    if args.chat_template_file:
        template = _read("--chat-template-file", args.chat_template_file)
    if not template:
        return None
    check_template(template)
    return template


def _folder(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadParameter("--slot-save-path", text, f"a folder to write in ({error})") from None
    return path


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(name, path, f"a file with UTF-8 text ({error})") from None


def _is_prefix(text: str) -> bool:
    return not text or (text.startswith("/") and not text.endswith("/"))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
