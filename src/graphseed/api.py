"""The Python interface: an engine from a model's name, in one line.

Owns the composition of driver, model, core and thread for programs that import graphseed. The
command line composes its own; everything that runs is below.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from graphseed.capture import LogLines, read_selectors
from graphseed.drivers import open_driver
from graphseed.engine import Engine as EngineThread
from graphseed.engine import EngineConfig, EngineCore, ModelCannot, Request, SamplingParams
from graphseed.models import Model, load_model

Prompt = str | Iterable[int] | Sequence[Mapping[str, str]]


class Engine(EngineThread):
    """An engine on a thread of its own, ready to answer. Close it, or use it in a `with` block.

    `model` is a name (see README) or a loaded Model, which must be on `device`. `prompt_graphs` is
    off, seed or resident; None leaves it to the environment, as the command line does.
    """

    def __init__(
        self,
        model: str | Model = "smollm2",
        config: EngineConfig | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        prompt_graphs: str | None = None,
    ) -> None:
        selection = read_selectors(os.environ, prompt_graphs)
        driver = open_driver(device)
        if isinstance(model, str):
            model = load_model(
                model, device=driver.device, dtype=dtype, bf16_is_fast=driver.computes_bf16_fast,
                takes_rerankers=True,
            )  # fmt: skip
        self.model = model
        core = EngineCore(model, driver, config, selection)
        core.log.subscribe(LogLines())
        super().__init__(core)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: plain text as it is, messages through the chat template."""
        ids: list[int]
        if isinstance(prompt, str):
            ids = self.model.encode(prompt)
            return ids
        items: list[Any] = list(prompt)
        is_chat = bool(items) and isinstance(items[0], Mapping)
        ids = self.model.chat(items) if is_chat else items
        return ids

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
    ) -> list[Request]:
        """Answer a list of prompts together: texts, token ids, or lists of chat messages.

        Returns the finished requests in their order; `.text`, `.output_ids` and `.finish_reason`
        are the answers. The first error of a request is raised, once the others were cancelled.
        """
        if isinstance(prompts, str):
            raise TypeError(f"prompts is the text {prompts[:40]!r}; expected a list of prompts")
        return super().generate([self.encode(p) for p in prompts], params, progress=progress)

    def rerank(
        self, query: str, documents: Iterable[str], *, progress: bool = False
    ) -> list[float]:
        """Score each of the documents with a query: the higher, the better; in their order.

        For a reranker alone. A score is what the model's head says, without a sigmoid; `model.pair`
        says how query and document become a prompt. Raises ModelCannot for another kind of model,
        and the first error of a request, once the others were cancelled.
        """
        if isinstance(documents, str):
            raise TypeError(f"documents is the text {documents[:40]!r}; expected a list of texts")
        if self.model.can_generate:
            raise ModelCannot(self.model.name, self.model.kind)
        prompts = [self.model.pair(query, document) for document in documents]
        makers = [partial(self.core.score_request, prompt) for prompt in prompts]
        scores = [request.score for request in self.run(makers, progress=progress)]
        return [score for score in scores if score is not None]
