"""A model that is ready for the engine.

Owns the frozen weights on their device, the tokenizer, and what the engine must know to plan and
to sample. Does not know where K/V memory is: attention reaches it through the attention context
that is current during `forward`. The module is never changed after loading, so that what a graph
baked in stays true.

Shapes: T tokens in the step, S rows whose logits (or scores) are read, V vocabulary, H hidden size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphseed.capture.identity import FirstNode
from graphseed.models.errors import ModelError
from graphseed.models.heads import ModelKind
from graphseed.models.pairs import pair_ids


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer's attention is called with: the shape of its K/V, and the plain values."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int  # tokens a query sees, itself included; 0: all before it
    scale: float = 1.0  # of the scores
    soft_cap: float = 0.0  # of the scores; 0.0: none
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How the model's publisher samples; neutral where nothing is said."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, eq=False)
class Model:
    """Weights, tokenizer and facts. Made by load_model; owns its memory until it is dropped."""

    name: str
    source: str  # where the weights came from: a folder, or "random, seed N"
    module: Any  # PreTrainedModel: eval, frozen, attention "graphseed_paged"
    tokenizer: Any  # PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    vocab_size: int  # columns of the logits; a tokenizer may use fewer
    context_len: int
    hidden_size: int
    eos_ids: frozenset[int]
    sampling: SamplingDefaults
    layers: tuple[LayerShape, ...]
    num_parameters: int  # a tied weight counts once
    weight_bytes: int
    kind: ModelKind = ModelKind.CAUSAL

    @property
    def can_generate(self) -> bool:
        """Whether it has logits of a next token."""
        return self.kind is ModelKind.CAUSAL

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits [S, V], in the model's dtype, of the rows asked for.

        `token_ids` [T], `positions` [T] and `logits_rows` [S] are int32 on the model's device.
        Needs a current attention context. Host-pure (I11): no value of a tensor is read. Not for a
        reranker, which has none.
        """
        # A tensor of rows, never a count: a count makes the head's input a strided view, and with
        # frozen weights that copies the whole transposed head at each call.
        output = self.module(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The last hidden state [T, H], in the model's dtype, after the final norm.

        As `forward`, without the head.
        """
        output = self.module.base_model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [S] float64 of hidden states [S, H]: a reranker's head, as it is, no sigmoid.

        Runs outside the step. Products and sum are float64, by torch's own kernels: no switch of a
        matrix library changes a score, and none is rounded to the model's dtype.
        """
        weight: torch.Tensor = self.module.score.weight  # [1, H]
        return (hidden.double() * weight.double()).sum(-1)

    def first_node(self, num_tokens: int) -> FirstNode:
        """What a forward of `num_tokens` tokens begins with: the embedding."""
        shape = (1, num_tokens, self.hidden_size)
        return FirstNode("aten.embedding", shape, str(self.dtype).removeprefix("torch."))

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, no template; led by a BOS if the tokenizer adds one."""
        ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        return ids

    def pair(self, query: str, document: str, template: str | None = None) -> list[int]:
        """Token ids of a query with a document, whose last one a reranker's head reads.

        `models.pairs` says how they are joined; `template` comes before the tokenizer's own. As in
        transformers, the head reads the last token that is no padding: such ones are cut off the
        end. Raises ModelError when the template refuses the two.
        """
        ids = pair_ids(self.tokenizer, query, document, template)
        padding = self.module.config.get_text_config().pad_token_id
        while len(ids) > 1 and ids[-1] == padding:
            ids.pop()
        return ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins.

        Each message has "role" and "content". Without a chat template the contents are joined as
        they are. Raises ModelError when the template refuses the conversation.
        """
        if self.tokenizer.chat_template is None:
            return self.encode("".join(message["content"] for message in messages))
        from jinja2 import TemplateError

        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                return_dict=False,
            )
        except TemplateError as error:
            raise ModelError(
                f"the chat template of {self.name} refused the conversation: {error}"
            ) from error
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special tokens and ids the tokenizer does not have give nothing."""
        text: str = self.tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def eos_ids_of(module: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a sequence, by generation_config and config.

    The tokenizer is asked only when neither says: files in the wild disagree there.
    """
    config = module.config
    ids: set[int] = set()
    for holder in (_generation_config(module), config, config.get_text_config()):
        said = getattr(holder, "eos_token_id", None)
        ids |= set(said if isinstance(said, (list, tuple)) else () if said is None else (said,))
    if not ids and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(int(i) for i in ids)


def sampling_defaults_of(module: Any) -> SamplingDefaults:
    """The sampling that the model's generation_config asks for."""
    neutral = SamplingDefaults()
    said = _generation_config(module)

    def value(name: str) -> Any:
        found = getattr(said, name, None)
        return getattr(neutral, name) if found is None else found

    return SamplingDefaults(
        do_sample=bool(value("do_sample")),
        temperature=float(value("temperature")),
        top_k=int(value("top_k")),
        top_p=float(value("top_p")),
        min_p=float(value("min_p")),
        repetition_penalty=float(value("repetition_penalty")),
    )


def _generation_config(module: Any) -> Any:
    """None for a module that generates nothing."""
    return getattr(module, "generation_config", None)
