"""The flags of `graphseed serve`, as data.

Owns the table of flags that are used, and what a flag is; unused has those that are not. Does
not parse.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Kind(Enum):
    """What a flag takes."""

    TEXT = "text"
    WHOLE = "whole"
    NUMBER = "number"
    LIST = "list"  # one value each time it is given
    SWITCH = "switch"  # none


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that is used."""

    key: str  # of ServeArgs
    kind: Kind
    names: tuple[str, ...]
    help: str
    env: str = ""
    off_names: tuple[str, ...] = ()  # of a switch
    metavar: str = "N"


@dataclass(frozen=True, slots=True)
class Other:
    """Flags of llama-server that are known and not used."""

    names: tuple[str, ...]
    why: str
    num_values: int = 1
    env: str = ""
    is_refused: bool = False
    limits_origins: bool = False  # llama-server answers this machine's pages alone with it


def _text(key: str, names: str, help: str, env: str = "", metavar: str = "TEXT") -> Flag:
    return Flag(key, Kind.TEXT, tuple(names.split()), help, env, metavar=metavar)


def _whole(key: str, names: str, help: str, env: str = "") -> Flag:
    return Flag(key, Kind.WHOLE, tuple(names.split()), help, env)


def _number(key: str, names: str, help: str, env: str = "") -> Flag:
    return Flag(key, Kind.NUMBER, tuple(names.split()), help, env, metavar="X")


def _many(key: str, names: str, help: str, env: str = "", metavar: str = "TEXT") -> Flag:
    return Flag(key, Kind.LIST, tuple(names.split()), help, env, metavar=metavar)


def _switch(key: str, names: str, help: str, env: str = "", off: str = "") -> Flag:
    return Flag(key, Kind.SWITCH, tuple(names.split()), help, env, tuple(off.split()))


USED: Final[tuple[Flag, ...]] = (
    _text(
        "model", "-m --model",
        "smollm2, a Hugging Face directory or hub id, a GGUF file, or random:PRESET (default: "
        "smollm2)", "LLAMA_ARG_MODEL", "MODEL",
    ),
    _text("hf_repo", "-hf -hfr --hf-repo", "a hub repository", "LLAMA_ARG_HF_REPO", "OWNER/NAME"),
    _text("hf_file", "-hff --hf-file", "a GGUF file of it", "LLAMA_ARG_HF_FILE", "FILE"),
    _text("hf_token", "-hft --hf-token", "access token of the hub", "HF_TOKEN", "TOKEN"),
    _switch("is_offline", "--offline", "ask no network for the model", "LLAMA_ARG_OFFLINE"),
    _text("device", "-dev --device", "auto, cpu, cuda, cuda:N", "LLAMA_ARG_DEVICE", "DEVICE"),
    _text(
        "gpu_layers", "-ngl --gpu-layers --n-gpu-layers",
        "0: the CPU; anything else: every layer on the GPU", "LLAMA_ARG_N_GPU_LAYERS", "N",
    ),
    _whole("main_gpu", "-mg --main-gpu", "which GPU", "LLAMA_ARG_MAIN_GPU"),
    _text("dtype", "--dtype", "auto, bf16, fp16, fp32 (default: auto)", metavar="DTYPE"),
    _whole("threads", "-t --threads", "CPU threads of one step", "LLAMA_ARG_THREADS"),
    _whole(
        "ctx_size", "-c --ctx-size",
        "tokens of all slots together, 0: the model's (default: 0)", "LLAMA_ARG_CTX_SIZE",
    ),
    _whole(
        "batch_size", "-b --batch-size",
        "a forward pass takes the smaller of -b and -ub (default: 2048)", "LLAMA_ARG_BATCH",
    ),
    _whole(
        "ubatch_size", "-ub --ubatch-size", "tokens of one forward pass (default: 512)",
        "LLAMA_ARG_UBATCH",
    ),
    _whole(
        "parallel", "-np --parallel", "slots, -1: 4 that share -c (default: -1)",
        "LLAMA_ARG_N_PARALLEL",
    ),
    _switch(
        "is_unified", "-kvu --kv-unified", "each slot may use all of -c", "LLAMA_ARG_KV_UNIFIED",
        "-no-kvu --no-kv-unified",
    ),
    _text(
        "prompt_graphs", "--prompt-graphs",
        "off, seed or resident: when prompt graphs are captured; seed is also "
        "GGML_CUDA_PROMPT_GRAPH_CAPTURE_SEED=1 (default: off)", metavar="POLICY",
    ),
    _text(
        "record_plans", "--record-plans",
        "write every step's plan, for `graphseed replay-plans`; slows the server down",
        metavar="FILE",
    ),
    _whole("max_waiting", "--max-waiting", "requests that may wait for a slot (default: 1024)"),
    _text(
        "host", "--host", "addresses, comma-separated, or a path that ends in .sock (default: "
        "127.0.0.1)", "LLAMA_ARG_HOST", "HOST",
    ),
    _whole("port", "--port", "0: any that is free (default: 8080)", "LLAMA_ARG_PORT"),
    _switch("reuses_port", "--reuse-port", "share the port", "LLAMA_ARG_REUSE_PORT"),
    _text("api_prefix", "--api-prefix", "path before every path", "LLAMA_ARG_API_PREFIX", "PATH"),
    _text("ssl_key_file", "--ssl-key-file", "PEM", "LLAMA_ARG_SSL_KEY_FILE", "FILE"),
    _text("ssl_cert_file", "--ssl-cert-file", "PEM", "LLAMA_ARG_SSL_CERT_FILE", "FILE"),
    _text(
        "alias", "-a --alias", "names of the model, comma-separated", "LLAMA_ARG_ALIAS", "NAMES"
    ),
    _text("tags", "--tags", "tags of the model, comma-separated", "LLAMA_ARG_TAGS", "TAGS"),
    _many("api_key", "--api-key", "keys, comma-separated", "LLAMA_API_KEY", "KEYS"),
    _text(
        "api_key_file", "--api-key-file", "a key on each line", "LLAMA_ARG_API_KEY_FILE", "FILE"
    ),
    _text(
        "cors_origins", "--cors-origins",
        "who may use it from a browser, comma-separated; localhost: this machine's pages "
        "(default: whoever asks)", "LLAMA_ARG_CORS_ORIGINS", "ORIGINS",
    ),
    _whole(
        "predict", "-n --predict --n-predict", "new tokens where a request does not say, -1: "
        "until the context is full (default: -1)", "LLAMA_ARG_N_PREDICT",
    ),
    _switch("has_metrics", "--metrics", "answer /metrics", "LLAMA_ARG_ENDPOINT_METRICS"),
    _switch(
        "has_slots", "--slots", "answer /slots (default)", "LLAMA_ARG_ENDPOINT_SLOTS", "--no-slots"
    ),
    _switch("has_props", "--props", "answer POST /props", "LLAMA_ARG_ENDPOINT_PROPS"),
    _switch(
        "has_ui", "--ui --webui", "answer / with a page (default)", "LLAMA_ARG_UI",
        "--no-ui --no-webui",
    ),
    _switch("embeds", "--embedding --embeddings", "answer embeddings", "LLAMA_ARG_EMBEDDINGS"),
    _text(
        "pooling", "--pooling", "none, mean, cls or last (default: mean)", "LLAMA_ARG_POOLING",
        "KIND",
    ),
    _switch(
        "uses_jinja", "--jinja", "render the model's chat template (default)", "LLAMA_ARG_JINJA",
        "--no-jinja",
    ),
    _text(
        "reasoning", "-rea --reasoning", "on, off or auto: let chat templates begin a thought",
        "LLAMA_ARG_REASONING", "WORD",
    ),
    _text(
        "reasoning_format", "--reasoning-format",
        "deepseek, none or auto: where thoughts are in an answer", "LLAMA_ARG_THINK", "WORD",
    ),
    _text(
        "chat_template", "--chat-template", "a template in place of the model's",
        "LLAMA_ARG_CHAT_TEMPLATE", "JINJA",
    ),
    _text(
        "chat_template_file", "--chat-template-file", "a file with it",
        "LLAMA_ARG_CHAT_TEMPLATE_FILE", "FILE",
    ),
    _switch(
        "caches_prompts", "--cache-prompt", "reuse the prefix of earlier prompts (default)",
        "LLAMA_ARG_CACHE_PROMPT", "--no-cache-prompt",
    ),
    _text("slot_save_path", "--slot-save-path", "allow actions on slots", metavar="DIR"),
    _whole(
        "sleep_idle_seconds", "--sleep-idle-seconds", "unload the model when idle, -1: never "
        "(default: -1)",
    ),
    _whole("timeout", "-to --timeout", "seconds of one request (default: 3600)",
           "LLAMA_ARG_TIMEOUT"),
    _whole(
        "sse_ping_interval", "--sse-ping-interval", "seconds between pings of a quiet stream, -1: "
        "none (default: 30)", "LLAMA_ARG_SSE_PING_INTERVAL",
    ),
    _whole("max_body_bytes", "--max-body-bytes", "of one request (default: 64 MiB)"),
    _number(
        "drain_seconds", "--drain-seconds", "that running answers have at SIGTERM (default: 3)"
    ),
    _whole("seed", "-s --seed", "-1: each request draws its own (default)"),
    _number("temperature", "--temp --temperature", "(default: 0.8)", "LLAMA_ARG_TEMPERATURE"),
    _whole("top_k", "--top-k", "0: all (default: 40)", "LLAMA_ARG_TOP_K"),
    _number("top_p", "--top-p", "(default: 0.95)", "LLAMA_ARG_TOP_P"),
    _number("min_p", "--min-p", "(default: 0.05)", "LLAMA_ARG_MIN_P"),
    _number("typical", "--typical --typical-p", "1: off (default)"),
    _whole("repeat_last_n", "--repeat-last-n", "tokens penalties look back on (default: 64)"),
    _number(
        "repeat_penalty", "--repeat-penalty", "1: off (default)", "LLAMA_ARG_REPEAT_PENALTY"
    ),
    _number(
        "presence_penalty", "--presence-penalty", "0: off (default)", "LLAMA_ARG_PRESENCE_PENALTY"
    ),
    _number(
        "frequency_penalty", "--frequency-penalty", "0: off (default)",
        "LLAMA_ARG_FREQUENCY_PENALTY",
    ),
    _many("logit_bias", "-l --logit-bias", "e.g. 15043+1 or 15043-inf", metavar="ID(+/-)BIAS"),
    _many("stop", "-r --reverse-prompt", "stop at this text"),
    _switch("ignores_eos", "--ignore-eos", "go on after end of sequence"),
    _switch("logs_prompts", "--log-prompts", "log what is asked; never done otherwise"),
    _switch(
        "is_verbose", "-v --verbose --log-verbose", "log debug lines too, and answer with __verbose"
    ),
    _whole(
        "verbosity", "-lv --verbosity --log-verbosity", "1 errors, 2 warnings, 3 information, 4 "
        "and more debug lines (default: 3)", "LLAMA_ARG_LOG_VERBOSITY",
    ),
    _text("log_file", "--log-file", "log there too", "LLAMA_ARG_LOG_FILE", "FILE"),
    _switch("logs_nothing", "--log-disable", "log nothing"),
    _switch("lists_devices", "--list-devices", "name the devices and exit"),
    _switch("tells_version", "--version", "tell the version and exit"),
)  # fmt: skip
