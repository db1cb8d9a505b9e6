"""llama-server's objects: what one generation is told as, while it runs and at its end.

Owns Telling, which takes the pieces of one generation and knows what they come to, the shapes of
/completion, the settings of a generation, progress and usage. Other dialects are told from the same
Telling. Does not run anything.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final

from graphseed.engine import FinishReason, SamplingParams
from graphseed.server.generation import Generation, Piece
from graphseed.server.state import ServerState
from graphseed.server.text.tokens import decode
from graphseed.server.wire.params import SAMPLERS, Asked
from graphseed.server.wire.probs import Probabilities

_STOP_TYPES: Final = {
    FinishReason.END_OF_SEQUENCE: "eos",
    FinishReason.STOP_STRING: "word",
    FinishReason.MAX_TOKENS: "limit",
    FinishReason.CONTEXT_FULL: "limit",
}


class Telling:
    """What one generation has brought so far. Takes its pieces in order; shapes read it."""

    def __init__(
        self, state: ServerState, generation: Generation, asked: Asked, index: int
    ) -> None:
        self.state = state
        self.generation = generation
        self.asked = asked
        self.index = index  # among the answers of its HTTP request
        self.text = ""
        self.token_ids: list[int] = []
        self.entries: list[dict[str, Any]] = []  # what is known of each token, where asked for
        self.num_prompt_done: int | None = None  # as last reported
        model = state.ready.model
        self._model = model
        prompt_ids = generation.request.prompt_ids
        self._probs = Probabilities(model, prompt_ids, asked) if asked.has_logprobs else None

    def take(self, piece: Piece) -> dict[str, Any] | None:
        """Take one piece in and return its token's probabilities, where they were asked for."""
        if piece.num_prompt_done is not None:
            self.num_prompt_done = piece.num_prompt_done
            return None
        if self.asked.n_predict == 0:  # the engine needs one token to evaluate a prompt
            return None
        self.text += piece.text
        if piece.token_id is not None:
            self.token_ids.append(piece.token_id)
        entry = None if self._probs is None else self._probs.entry(piece)
        if entry is not None:
            self.entries.append(entry)
        return entry

    @property
    def stop_type(self) -> str:
        """Why it ended: eos, word or limit. Only when all is taken."""
        if self.asked.n_predict == 0 or self.generation.was_out_of_time:
            return "limit"
        return _STOP_TYPES[self.generation.finish_reason]

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended it: OpenAI's `length` in place of `stop`."""
        return self.stop_type == "limit"

    @property
    def timings(self) -> dict[str, Any]:
        """llama-server's timings of the generation as it was told so far."""
        timings = self.generation.timings
        if self.asked.n_predict == 0 or self.generation.was_out_of_time:
            timings["predicted_n"] = len(self.token_ids)
        return timings

    @property
    def progress_timings(self) -> dict[str, Any]:
        """The timings that go with a report of progress: nothing is generated yet."""
        timings = self.generation.timings
        done = (self.num_prompt_done or 0) - timings["cache_n"]
        spent_ms = timings["prompt_ms"] if done else 0.0
        zeros = dict.fromkeys((name for name in timings if name.startswith("predicted_")), 0)
        return {
            **timings, **zeros,
            "prompt_n": done,
            "prompt_ms": spent_ms,
            "prompt_per_token_ms": spent_ms / done if done else 0.0,
            "prompt_per_second": 1e3 * done / spent_ms if spent_ms else 0.0,
        }  # fmt: skip

    @property
    def progress(self) -> dict[str, Any]:
        """llama-server's `prompt_progress`."""
        request = self.generation.request
        return {
            "total": len(request.prompt_ids),
            "cache": request.num_cached,
            "processed": self.num_prompt_done or 0,
            "time_ms": self.progress_timings["prompt_ms"],
        }

    def more_of_chunk(self, piece: Piece) -> dict[str, Any]:
        """What a chunk of any dialect has besides its text: progress and timings, if asked for."""
        is_progress = piece.num_prompt_done is not None
        more: dict[str, Any] = {"prompt_progress": self.progress} if is_progress else {}
        if self.asked.has_timings_per_token:
            more["timings"] = self.progress_timings if is_progress else self.timings
        return more

    @property
    def prompt(self) -> str:
        """The prompt as text, special tokens written out."""
        return decode(self._model, self.generation.request.prompt_ids)


def partial_object(
    telling: Telling, piece: Piece, entry: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A chunk of a /completion stream, for a piece that `telling` has taken."""
    request = telling.generation.request
    chunk: dict[str, Any] = {
        "index": telling.index,
        "content": piece.text,
        "tokens": [] if piece.token_id is None else [piece.token_id],
        "stop": False,
        "id_slot": -1 if request.slot is None else request.slot,
        "tokens_predicted": len(telling.token_ids),
        "tokens_evaluated": len(request.prompt_ids),
    }
    if entry is not None:
        chunk["completion_probabilities"] = [entry]
    return chunk | telling.more_of_chunk(piece)


def final_object(telling: Telling, *, is_streaming: bool) -> dict[str, Any]:
    """The whole answer of /completion, or the last chunk of its stream, which repeats no text."""
    request, asked = telling.generation.request, telling.asked
    returns_tokens = asked.returns_tokens and not is_streaming
    num_prompt, num_new = len(request.prompt_ids), len(telling.token_ids)
    answer: dict[str, Any] = {
        "index": telling.index,
        "content": "" if is_streaming else telling.text,
        "tokens": telling.token_ids if returns_tokens else [],
        "id_slot": -1 if request.slot is None else request.slot,
        "stop": True,
        "model": telling.state.name,
        "tokens_predicted": num_new,
        "tokens_evaluated": num_prompt,
        "generation_settings": generation_settings(telling),
        "prompt": telling.prompt,
        "has_new_line": "\n" in telling.text,
        "truncated": request.finish_reason is FinishReason.CONTEXT_FULL,
        "stop_type": telling.stop_type,
        "stopping_word": request.stopping_word or "",
        "tokens_cached": num_prompt + max(0, num_new - 1),  # whose K/V was written
        "timings": telling.timings,
    }
    if telling.entries and not is_streaming:
        answer["completion_probabilities"] = telling.entries
    return picked(answer, asked.response_fields)


def picked(answer: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The fields of an answer that are asked for (`a/b` is b within a); no names: all of it.

    Names that are not there are left out.
    """
    if not names:
        return answer
    found: dict[str, Any] = {}
    for name in names:
        value: Any = answer
        for step in name.split("/"):
            if not isinstance(value, dict) or step not in value:
                break
            value = value[step]
        else:
            found[name] = value
    return found


def usage(tellings: Sequence[Telling]) -> dict[str, Any]:
    """OpenAI's usage of a whole HTTP request. A prompt with several choices counts once."""
    num_choices = tellings[0].asked.num_choices if tellings else 1
    prompts = [telling.generation.request for telling in tellings[::num_choices]]
    num_prompt = sum(len(request.prompt_ids) for request in prompts)
    num_new = sum(len(telling.token_ids) for telling in tellings)
    return {
        "completion_tokens": num_new,
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(request.num_cached for request in prompts)},
    }


def fingerprint(state: ServerState) -> str:
    """`system_fingerprint`: the build, in llama-server's look."""
    return state.build if state.build.startswith("b") else f"b0-{state.build}"


def generation_settings(telling: Telling) -> dict[str, Any]:
    """`generation_settings` of one answer: what it was generated with."""
    asked = telling.asked
    return settings_of_params(telling.generation.request.params) | {
        "n_predict": asked.n_predict,
        "max_tokens": asked.n_predict,
        "n_keep": asked.n_keep,
        "stream": asked.is_streaming,
        "n_probs": asked.num_top,
        "grammar": asked.gbnf or "",
        "samplers": list(asked.samplers),
        "timings_per_token": asked.has_timings_per_token,
        "post_sampling_probs": asked.is_post_sampling,
    }


def settings_of_params(params: SamplingParams) -> dict[str, Any]:
    """llama-server's settings of a generation, as far as sampling goes; absent samplers are off."""
    return {
        "n_predict": params.max_tokens,
        "seed": params.seed,
        "temperature": params.temperature,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "typical_p": params.typical_p,
        "repeat_last_n": params.repeat_last_n,
        "repeat_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 0,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "stop": list(params.stop),
        "max_tokens": params.max_tokens,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": params.ignore_eos,
        "stream": False,
        "logit_bias": [
            {"token": token, "bias": None if bias == -inf else bias}
            for token, bias in params.logit_bias
        ],
        "n_probs": params.num_logprobs,
        "min_keep": 0,
        "grammar": "",
        "samplers": list(SAMPLERS),
        "timings_per_token": False,
        "post_sampling_probs": False,
        "lora": [],
    }
