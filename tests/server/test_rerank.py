"""/rerank and its other spellings, on a reranker and on a model that is none."""

import copy
import dataclasses
import functools

import pytest
import schemathesis
import torch

from graphseed.capture import Namespace
from graphseed.server.state import Served
from tests.models.test_pairs import CHATML, ROLES, tokenizer_with
from tests.server.test_schema import check_answers

PATHS = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
QUERY = "Which animal barks?"
DOCUMENTS = [
    "A dog is an animal that barks.", "Paris is the capital of France.", "Cats meow.",
    "A machine is a physical system that uses power to apply forces and control movement.",
]  # fmt: skip


@pytest.fixture
def make_reranker(make_server):
    return functools.partial(make_server, preset="tiny-qwen3-reranker")


@pytest.fixture
def reranker(make_reranker):
    return make_reranker()


def error(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


def ranked(server, **body):
    response = server.post("/rerank", {"query": QUERY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def scores_of(answer):
    return {one["index"]: one["relevance_score"] for one in answer["results"]}


@pytest.mark.parametrize("path", PATHS)
def test_the_best_document_comes_first_with_the_plain_models_score(reranker, path):
    response = reranker.post(path, {"query": QUERY, "documents": DOCUMENTS, "model": "any"})
    answer, model = response.json(), reranker.state.ready.model
    assert set(answer) == {"model", "object", "usage", "results"}
    assert answer["object"] == "list" and answer["model"] == reranker.state.name
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("sdpa")
    for one in answer["results"]:
        ids = model.tokenizer(QUERY, DOCUMENTS[one["index"]], return_tensors="pt").input_ids
        with torch.no_grad():
            want = module(ids, use_cache=False).logits.item()
        # Paged attention in chunks against one softmax, float32: see tests/engine/test_rerank.py.
        assert one["relevance_score"] == pytest.approx(want, abs=2e-4, rel=2e-4)


def test_usage_counts_the_query_with_each_document(reranker):
    usage = ranked(reranker, documents=DOCUMENTS)["usage"]
    num = sum(len(QUERY) + len(document) for document in DOCUMENTS)  # a token is a byte here
    assert usage == {"prompt_tokens": num, "total_tokens": num}


@pytest.mark.parametrize(("top_n", "num"), [(None, 4), (0, 0), (2, 2), (4, 4), (99, 4)])
def test_top_n_tells_the_best_of_all(reranker, top_n, num):
    whole = ranked(reranker, documents=DOCUMENTS)
    cut = ranked(reranker, documents=DOCUMENTS, top_n=top_n)
    assert cut["results"] == whole["results"][:num]
    assert cut["usage"] == whole["usage"]  # all were read
    assert len(ranked(reranker, texts=DOCUMENTS, top_n=top_n)) == num


def test_texts_are_answered_in_TEIs_form_with_the_text_where_it_is_asked_for(reranker):
    want = scores_of(ranked(reranker, documents=DOCUMENTS))
    plain = ranked(reranker, texts=DOCUMENTS)
    assert [sorted(one) for one in plain] == [["index", "score"]] * 4
    assert {one["index"]: one["score"] for one in plain} == want
    told = ranked(reranker, texts=DOCUMENTS, return_text=True)
    assert [one["text"] for one in told] == [DOCUMENTS[one["index"]] for one in told]
    jina = ranked(reranker, documents=DOCUMENTS, return_text=True)
    assert all(sorted(one) == ["index", "relevance_score"] for one in jina["results"])


def test_equal_documents_have_equal_scores_and_keep_their_order(reranker):
    results = ranked(reranker, documents=["same", "other", "same", "same"])["results"]
    assert [one["index"] for one in results if one["index"] != 1] == [0, 2, 3]
    assert len({one["relevance_score"] for one in results}) == 2


@pytest.mark.parametrize("policy", ["seed", "resident"])
def test_I9_scores_are_the_same_under_every_policy_and_replayed(make_reranker, policy):
    want = ranked(make_reranker(), documents=DOCUMENTS)
    server = make_reranker(policy=policy)
    for _ in range(3):
        assert ranked(server, documents=DOCUMENTS) == want
    counts = server.engine.core.tally.counts[Namespace.PROMPT]
    assert counts.replayed and counts.replayed + counts.direct == counts.candidates
    rows = server.get("/prompt-graphs").json()["identities"]
    assert sum(row["replayed"] for row in rows) == counts.replayed


def test_under_resident_the_second_request_of_a_size_is_a_replay(make_reranker):
    server = make_reranker(policy="resident", num_parallel=1)
    counts = server.engine.core.tally.counts[Namespace.PROMPT]
    seen = []
    for number in range(3):
        before = counts.replayed
        ranked(server, documents=[f"document {number}"])
        server.engine.call(server.engine.core.settle)  # as it does by itself when idle
        seen.append(counts.replayed - before)
    assert seen == [0, 1, 1] and counts.seeded == 1


@pytest.mark.parametrize("documents", [[], None, 123, [1, 2, 3], "text", [["a"]]])
@pytest.mark.parametrize("preset", ["tiny-qwen3-reranker", "tiny-llama"])
def test_documents_that_are_none_are_refused_first(make_server, preset, documents):
    refused = error(
        make_server(preset=preset).post("/rerank", {"query": "q", "documents": documents}), 400
    )
    assert "documents" in refused["message"]


@pytest.mark.parametrize("preset", ["tiny-qwen3-reranker", "tiny-llama"])
def test_a_query_is_needed_to_rerank(make_server, preset):
    server = make_server(preset=preset)
    assert "query" in error(server.post("/rerank", {"documents": ["a"]}), 400)["message"]
    for wrong in ({"query": 7}, {"top_n": -1}, {"top_n": "2"}, {"return_text": "yes"}):
        error(server.post("/rerank", {"query": "q", "documents": ["a"], **wrong}), 400)
    error(server.http.post("/rerank", content=b"{"), 500)


def test_a_document_that_is_too_long_names_both_lengths_and_ends_nothing_else(reranker):
    refused = error(reranker.post("/rerank", {"query": "q", "documents": ["a", "b" * 300]}), 400)
    assert refused["type"] == "exceed_context_size_error"
    assert (refused["n_prompt_tokens"], refused["n_ctx"]) == (301, 256)
    assert len(ranked(reranker, documents=["a"])["results"]) == 1


def test_more_documents_than_may_wait_are_refused_at_once(make_reranker):
    server = make_reranker(max_waiting=3)
    refused = error(server.post("/rerank", {"query": "q", "documents": ["a"] * 6}), 400)
    assert "6 documents; expected at most 5" in refused["message"]
    assert len(ranked(server, documents=["a"] * 5)["results"]) == 5


def test_texts_that_are_long_together_are_tokenised_beside_the_event_loop(
    make_reranker, monkeypatch
):
    from graphseed.server.text import rerank

    server = make_reranker()
    want = ranked(server, documents=DOCUMENTS)
    monkeypatch.setattr(rerank, "BLOCKING_CHARACTERS", 0)
    assert ranked(server, documents=DOCUMENTS) == want


def test_scores_that_are_no_numbers_are_an_error_and_no_JSON(reranker, monkeypatch):
    from graphseed.engine.pooling import Embedding

    def take(self, hidden, is_last, own=Embedding.take):
        return own(self, hidden * float("nan"), is_last)

    monkeypatch.setattr(Embedding, "take", take)
    refused = error(reranker.post("/rerank", {"query": "q", "documents": ["a"]}), 500)
    assert "no finite numbers" in refused["message"]


def with_template(server, template):
    served = server.state.ready
    model = dataclasses.replace(served.model, tokenizer=tokenizer_with(template))
    server.state.served = Served(served.engine, model)
    return server


def test_a_template_makes_the_prompt_the_models_own_or_the_servers(make_reranker):
    num = len("Q:  D:  A:") + 1 + len(QUERY) + 1  # and a BOS
    for server in (
        with_template(make_reranker(), {"default": CHATML, "rerank": ROLES}),
        with_template(make_reranker(), ROLES),
        make_reranker(chat_template=ROLES.replace("{{ bos_token }}", "!")),
    ):
        assert ranked(server, documents=["a"])["usage"]["prompt_tokens"] == num


def test_a_template_that_is_none_for_a_pair_is_refused(make_reranker):
    server = make_reranker(chat_template="{{ messages[0].content }}")
    assert (
        "does not show both"
        in error(server.post("/rerank", {"query": "q", "documents": ["a"]}), 501)["message"]
    )
    template = "{% if document == 'b' %}{{ raise_exception('no b') }}{% endif %}" + ROLES
    server = make_reranker(chat_template=template)
    refused = error(server.post("/rerank", {"query": "q", "documents": ["a", "b"]}), 400)
    assert "no b" in refused["message"]


@pytest.mark.parametrize("path", PATHS)
def test_a_causal_model_reranks_nothing_and_says_so(server, path):
    for name in ("documents", "texts"):
        refused = error(server.post(path, {"query": "q", name: ["a", "b"], "top_n": 1}), 501)
        assert refused["type"] == "not_supported_error"
        assert "classification head" in refused["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "a"}), ("/completion", {"prompt": "a", "n_predict": 0}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/predict", {"instances": [{"messages": [{"role": "user", "content": "a"}]}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [None, "{{ raise_exception('only pairs') }}"])
def test_a_reranker_generates_nothing_and_says_what_it_is(make_reranker, path, body, template):
    response = with_template(make_reranker(), template).post(path, body)
    assert response.status_code == 501, response.text
    assert "is a reranker and cannot generate" in response.json()["error"]["message"]


def test_everything_else_answers_on_a_reranker(make_reranker, tmp_path):
    server = make_reranker(embeds=True, slot_save_path=tmp_path, has_metrics=True)
    ranked(server, documents=DOCUMENTS)
    response = server.post("/v1/embeddings", {"input": ["a", "b"]})
    assert [len(one["embedding"]) for one in response.json()["data"]] == [64, 64]
    listed = server.get("/v1/models").json()["models"][0]
    assert listed["capabilities"] == ["rerank", "embedding"]
    for path in ("/health", "/props", "/slots", "/metrics", "/prompt-graphs", "/"):
        assert server.get(path).status_code == 200, path
    assert server.post("/tokenize", {"content": "a"}).json() == {"tokens": [97]}
    for action in ("save", "restore", "erase"):
        response = server.post(f"/slots/0?action={action}", {"filename": "slot"})
        assert response.status_code == 200, response.text
    assert len(ranked(server, documents=DOCUMENTS)["results"]) == 4


def test_a_model_that_completes_says_so(server):
    assert server.get("/v1/models").json()["models"][0]["capabilities"] == ["completion"]


@pytest.mark.parametrize("mode", ["right", "wrong"])
@pytest.mark.parametrize("path", [*PATHS, "/completion", "/v1/chat/completions"])
def test_answers_are_as_the_document_says(make_reranker, mode, path):
    server = make_reranker(context_len=96, max_waiting=6)
    schema = schemathesis.openapi.from_asgi("/openapi.json", server.app)

    class Idle:
        def wait_until_idle(self):
            assert server.engine.core.scheduler.is_idle

    check_answers((Idle(), schema), mode, "POST", path, 6)
