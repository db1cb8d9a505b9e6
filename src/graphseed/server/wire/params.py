"""What a request's body asks for: llama-server's and OpenAI's fields made ready for the engine.

Owns Asked and `parse`. A field that is absent or null has the server's default, an unknown one is
ignored, one of a wrong type is an error that names it. Samplers that this engine does not have
(mirostat, DRY, XTC, dynamic temperature, top-n-sigma, LoRA) may be sent with the values that turn
them off; any other value is answered 501, so that nobody takes another distribution for the one
that was asked for. Their dependent values (`dry_base`, `mirostat_tau`, …) are ignored. Does not
know prompts, and compiles no grammar.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

from graphseed.engine import SamplingParams
from graphseed.models.model import Model
from graphseed.server.errors import InvalidRequest, NotSupported
from graphseed.server.state import ServerState
from graphseed.server.wire.fields import Fields, wrong

logger = logging.getLogger(__name__)

RANDOM_SEED: Final = 0xFFFF_FFFF  # -1 on the wire; as a server's default: each request draws
MAX_STOPS: Final = 256
MAX_CHOICES: Final = 128
MAX_BIASED_TEXTS: Final = 1024  # of logit_bias: each is tokenised
MIN_PING_SECONDS: Final = 0.1  # more often would be all that the event loop does
_SMALLEST_P: Final = 1e-9  # for top_p and typical_p of 0: the most likely token alone

# What the engine applies, in its order. One that `samplers` leaves out is not applied.
SAMPLERS: Final = ("penalties", "top_k", "typ_p", "top_p", "min_p", "temperature")
_SAMPLER_NAMES: Final = {
    "typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "top-k": "top_k",
    "top-p": "top_p", "min-p": "min_p", "typical-p": "typ_p",
    "e": "penalties", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p", "t": "temperature",
}  # fmt: skip
_NEUTRAL: Final[Mapping[str, Mapping[str, float]]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}

# Samplers that the engine lacks: the field, and whether a value turns it off.
_ABSENT: Final[tuple[tuple[str, Callable[[float], bool]], ...]] = (
    ("dynatemp_range", lambda value: value <= 0),
    ("mirostat", lambda value: value == 0),
    ("dry_multiplier", lambda value: value == 0),
    ("xtc_probability", lambda value: value <= 0),
    ("top_n_sigma", lambda value: value <= 0),
    ("adaptive_target", lambda value: value < 0),
    ("n_indent", lambda value: value <= 0),
)

# Of sampling: the least and the most that a number is moved to.
_NUMBERS: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, inf),
    "top_p": (_SMALLEST_P, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (_SMALLEST_P, 1.0),
    "repeat_penalty": (-inf, inf),
    "presence_penalty": (-inf, inf),
    "frequency_penalty": (-inf, inf),
}
_CONSTRAINTS: Final = frozenset({"grammar", "json_schema", "response_format"})
_FLAGS: Final[Mapping[str, str]] = {  # fields that say yes or no, and what of Asked they are
    "stream": "is_streaming",
    "post_sampling_probs": "is_post_sampling",
    "cache_prompt": "caches_prompt",
    "return_progress": "reports_progress",
    "timings_per_token": "has_timings_per_token",
    "return_tokens": "returns_tokens",
    "verbose": "is_verbose",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request's wishes, checked. The prompt is not among them."""

    params: SamplingParams  # of the first choice; see `params_of`
    n_predict: int  # as asked: 0 evaluates the prompt and generates nothing
    num_choices: int = 1
    is_streaming: bool = False
    has_logprobs: bool = False
    num_top: int = 0  # alternatives to show with each token; the engine may report more
    is_post_sampling: bool = False  # probabilities after the filters in place of log-probabilities
    gbnf: str | None = None
    json_schema: Any = None  # None: none; any other JSON value is one
    slot: int | None = None
    caches_prompt: bool = True
    max_predict_ms: float = 0.0
    seconds: float = 3600.0
    reports_progress: bool = False
    has_timings_per_token: bool = False
    returns_tokens: bool = False
    is_verbose: bool = False
    includes_usage: bool = False  # stream_options.include_usage
    response_fields: tuple[str, ...] = ()
    ping_seconds: float | None = None  # None: the server's
    samplers: tuple[str, ...] = SAMPLERS
    n_keep: int = 0

    @property
    def has_grammar(self) -> bool:
        """Whether the answer is constrained."""
        return self.gbnf is not None or self.json_schema is not None

    def params_of(self, choice: int) -> SamplingParams:
        """Parameters of one of the choices: each draws with a seed of its own."""
        seed = (self.params.seed + choice) % (1 << 64)
        return replace(self.params, seed=seed) if choice else self.params


def parse(state: ServerState, body: Mapping[str, Any]) -> Asked:
    """Check the fields of a body. Raises InvalidRequest and NotSupported.

    Both dialects are read, wherever they come from: `n_predict`, `max_completion_tokens` or
    `max_tokens` (in this order), `n_cmpl` or `n`, `n_probs` or OpenAI's `logprobs` (a number) and
    `top_logprobs` (beside `logprobs: true`).
    """
    fields = Fields(body)
    given = fields.given
    _refuse_absent(fields)
    gbnf, json_schema = _constraint(fields)
    has_grammar = gbnf is not None or json_schema is not None
    has_logprobs, num_top = _logprobs(fields)
    n_predict = _n_predict(fields, state.settings.num_predict)
    samplers = _samplers(fields)
    flags = {
        "caches_prompt": state.settings.caches_prompts,
        "is_verbose": state.settings.is_verbose,
    }
    # Most requests have few of all fields, and each that is looked for takes its time.
    flags |= {name: fields.flag(field, False) for field, name in _FLAGS.items() if field in given}
    asked = Asked(
        params=_sampling(state, fields, n_predict, samplers, has_grammar),
        n_predict=n_predict,
        num_choices=_num_choices(fields),
        has_logprobs=has_logprobs,
        num_top=num_top,
        gbnf=gbnf,
        json_schema=json_schema,
        slot=_slot(fields, state.ready.engine.core.config.num_parallel),
        max_predict_ms=max(0.0, fields.number("t_max_predict_ms", 0.0)),
        seconds=state.settings.timeout_seconds,
        includes_usage=fields.inner("stream_options").flag("include_usage", False),
        response_fields=fields.texts("response_fields"),
        ping_seconds=_ping_seconds(fields),
        samplers=samplers,
        n_keep=fields.whole("n_keep", 0),
        **flags,
    )
    if not has_logprobs:
        return asked
    return replace(asked, params=_with_logprobs(asked, state.ready.model.vocab_size))


def token_biases(model: Model, value: Any) -> tuple[tuple[int, float], ...]:
    """`logit_bias` in each of its forms, as pairs of token id and bias.

    A list of pairs or an object; a token is an id, or a text all of whose tokens are meant (in an
    object, digits are an id); false is never.
    """
    if value is None:
        return ()
    if isinstance(value, dict):
        entries: list[Any] = [[_key(key), bias] for key, bias in value.items()]
    elif isinstance(value, list):
        entries = value
    else:
        raise wrong("logit_bias", value, "a list of [token, bias] pairs, or an object")
    pairs: list[tuple[int, float]] = []
    num_texts = 0
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2:
            raise wrong("an entry of logit_bias", entry, "[token, bias]")
        num_texts += isinstance(entry[0], str)
        if num_texts > MAX_BIASED_TEXTS:
            raise InvalidRequest(
                f"logit_bias names more than {MAX_BIASED_TEXTS} texts; expected fewer, or token ids"
            )
        bias = _bias(entry[1])
        pairs += [(token, bias) for token in _biased(model, entry[0])]
    return tuple(pairs)


def _key(key: str) -> int | str:
    return int(key) if key.isdecimal() and len(key) < 20 else key


def _bias(value: Any) -> float:
    if value is False:
        return -inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise wrong("a bias of logit_bias", value, "a number, or false (never)")
    return float(value)


def _biased(model: Model, token: Any) -> list[int]:
    if isinstance(token, str):
        ids: list[int] = model.tokenizer(token, add_special_tokens=False, verbose=False).input_ids
        return ids
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < model.vocab_size:
        expected = f"a text, or an id from 0 to {model.vocab_size - 1}"
        raise wrong("a token of logit_bias", token, expected)
    return [token]


def _sampling(
    state: ServerState, fields: Fields, n_predict: int, samplers: tuple[str, ...], has_grammar: bool
) -> SamplingParams:
    own, model, given = state.settings.defaults, state.ready.model, fields.given
    values: dict[str, Any] = {name: getattr(own, name) for name in _NUMBERS}
    for name, (least, most) in _NUMBERS.items():
        if name in given:
            values[name] = min(most, max(least, fields.number(name, 0.0)))
    values["top_k"] = max(0, fields.whole("top_k", own.top_k))
    if "samplers" in fields:
        for name in set(SAMPLERS) - set(samplers):
            values |= _NEUTRAL[name]
    ignores_eos = fields.flag("ignore_eos", own.ignore_eos)
    biases = own.logit_bias + token_biases(model, fields.get("logit_bias"))
    if ignores_eos and not has_grammar:
        # As llama-server: an end of sequence is not even sampled. Where a grammar is complete it is
        # all that may come.
        biases += tuple((token, -inf) for token in sorted(model.eos_ids))
    return SamplingParams(
        **values,
        seed=_seed(fields, own.seed),
        max_tokens=max(1, n_predict) if n_predict >= 0 else -1,
        stop=_stops(fields, own.stop),
        ignore_eos=ignores_eos and not has_grammar,
        repeat_last_n=fields.whole("repeat_last_n", own.repeat_last_n),
        logit_bias=biases,
    )


def _with_logprobs(asked: Asked, vocab_size: int) -> SamplingParams:
    """What the engine must report so that the answer can show what it was asked to."""
    params = asked.params
    if not asked.is_post_sampling:
        return replace(params, num_logprobs=min(max(1, asked.num_top), vocab_size))
    if asked.has_grammar or (params.repeat_penalty != 1.0 and params.has_penalties):
        raise NotSupported(
            "post_sampling_probs cannot be had together with a grammar or a repeat_penalty; leave "
            "one of them out"
        )
    # The filters are computed again from what the engine reports: top_k alone bounds how many.
    is_moved = bool(params.logit_bias) or params.has_penalties
    is_bounded = params.is_greedy or params.top_k > 0
    num = 1 if params.is_greedy else params.top_k
    return replace(
        params,
        num_logprobs=vocab_size if is_moved or not is_bounded else min(num, vocab_size),
    )


def _seed(fields: Fields, own: int) -> int:
    seed = fields.whole("seed", own)
    if seed < 0:  # a C program's view of it
        seed %= 1 << 32
    return secrets.randbits(32) if seed == RANDOM_SEED else seed


def _stops(fields: Fields, own: tuple[str, ...]) -> tuple[str, ...]:
    stops = tuple(stop for stop in fields.texts("stop") if stop) if "stop" in fields else own
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; expected at most {MAX_STOPS}")
    return stops


def _n_predict(fields: Fields, own: int) -> int:
    for name in ("n_predict", "max_completion_tokens", "max_tokens"):
        if name in fields:
            value = fields.whole(name, own)
            if value < -2:
                raise wrong(name, value, "-1 (no limit), 0 (the prompt alone) or more")
            return max(-1, value)  # -2 was once "until the context is full", and -1 is that here
    return own


def _num_choices(fields: Fields) -> int:
    name = "n_cmpl" if "n_cmpl" in fields else "n"
    num = fields.whole(name, 1)
    if not 1 <= num <= MAX_CHOICES:
        raise wrong(name, num, f"1 to {MAX_CHOICES}")
    if fields.whole("best_of", num) != num:
        raise NotSupported(f"best_of is supported only where it equals {name}, which is {num}")
    return num


def _logprobs(fields: Fields) -> tuple[bool, int]:
    """Whether log-probabilities are asked for, and of how many tokens at each place."""
    if "n_probs" in fields:
        name = "n_probs"
    elif isinstance(fields.get("logprobs"), bool):
        if not fields.get("logprobs"):
            return False, 0
        name = "top_logprobs"
    elif "logprobs" in fields:
        name = "logprobs"
    else:
        return False, 0
    num = fields.whole(name, 0)
    if num < 0:
        raise wrong(name, num, "0 or more")
    return name != "n_probs" or num > 0, num


def _constraint(fields: Fields) -> tuple[str | None, Any]:
    """The grammar's text or the JSON schema, whichever field gives it."""
    if fields.given.isdisjoint(_CONSTRAINTS):
        return None, None
    gbnf = fields.text("grammar") or None
    schema = fields.get("json_schema")
    if gbnf is not None and schema is not None:
        raise InvalidRequest("grammar and json_schema are both given; expected one of them")
    form = fields.inner("response_format")
    kind = form.text("type", "text")
    if kind == "json_object":
        schema = form.body.get("schema", {}) if schema is None else schema
    elif kind == "json_schema":
        inner = form.inner("json_schema")
        if inner.get("schema") is None and schema is None:
            raise wrong("response_format.json_schema", form.get("json_schema"), "a schema in it")
        schema = inner.get("schema") if schema is None else schema
    elif kind != "text":
        raise wrong("response_format.type", kind, "text, json_object or json_schema")
    if schema is not None and not isinstance(schema, dict | bool):
        raise wrong("the JSON schema", schema, "an object")
    return (gbnf, None) if gbnf is not None else (None, schema)


def _samplers(fields: Fields) -> tuple[str, ...]:
    """The samplers that were asked for, of those there are. Their order is the engine's."""
    value = fields.get("samplers")
    if value is None:
        return SAMPLERS
    if isinstance(value, str):  # llama.cpp's one letter each
        value = list(value)
    given = Fields({"samplers": value}).texts("samplers")
    names = [_SAMPLER_NAMES.get(name, name) for name in given]
    kept = tuple(name for name in SAMPLERS if name in names)
    if list(kept) != [name for name in names if name in SAMPLERS]:
        logger.debug("samplers %s are applied in the order %s", names, kept)
    return kept


def _slot(fields: Fields, num_slots: int) -> int | None:
    slot = fields.whole("id_slot", -1)
    if not -1 <= slot < num_slots:
        raise wrong("id_slot", slot, f"a slot from 0 to {num_slots - 1}, or -1 (any)")
    return None if slot == -1 else slot


def _ping_seconds(fields: Fields) -> float | None:
    if "sse_ping_interval" not in fields:
        return None
    seconds = fields.number("sse_ping_interval", -1.0)
    if seconds != -1.0 and seconds < MIN_PING_SECONDS:
        expected = f"at least {MIN_PING_SECONDS:g} seconds, or -1 (no pings)"
        raise wrong("sse_ping_interval", seconds, expected)
    return seconds


def _refuse_absent(fields: Fields) -> None:
    for name, is_off in _ABSENT:
        if name in fields.given and not is_off(fields.number(name, 0.0)):
            raise NotSupported(
                f"{name} is {fields.get(name)!r}, and this server does not have it; leave it out"
            )
    adapters = fields.get("lora")
    if adapters:
        raise NotSupported("lora names adapters, and this server has none; leave it out")
