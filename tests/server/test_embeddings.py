"""/v1/embeddings and /embedding."""

import asyncio
import base64
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphseed.engine import Pooling
from graphseed.server.text import embeddings
from graphseed.server.text.embeddings import normalized

TEXT = "I believe the meaning of life is"
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture
def server(make_server):
    return make_server(embeds=True)


def raw(server, ids, pooling=Pooling.MEAN):
    """The engine's own rows, [rows, H]."""
    request = server.engine.core.embedding_request(ids, pooling)
    for _ in server.engine.start(request):
        pass
    return np.array(request.embedding, dtype=np.float32)


def ids_of(server, text):
    return server.post("/tokenize", {"content": text, "add_special": True}).json()["tokens"]


def vectors(response):
    assert response.status_code == 200, response.text
    return [np.array(item["embedding"], dtype=np.float32) for item in response.json()["data"]]


def error(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS, Pooling.LAST])
def test_an_embedding_is_the_engines_made_to_length_one(make_server, pooling):
    server = make_server(embeds=True, pooling=pooling)
    response = server.post("/v1/embeddings", {"input": TEXT, "model": "any"})
    body, ids = response.json(), ids_of(server, TEXT)
    assert body["object"] == "list" and body["model"] == server.state.name
    assert body["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert [(d["object"], d["index"]) for d in body["data"]] == [("embedding", 0)]
    (got,) = vectors(response)
    (want,) = raw(server, ids, pooling)
    # One division in float64 and a rounding to float32: half a unit in the last place each.
    np.testing.assert_allclose(got, want / np.linalg.norm(want.astype(float)), rtol=2e-7)
    assert abs(np.linalg.norm(got.astype(float)) - 1) < 1e-6


def test_many_inputs_are_answered_in_their_order_and_side_by_side(make_server):
    server = make_server(embeds=True, num_parallel=4)
    texts = [f"text {n} " * (n % 5 + 1) for n in range(9)]
    response = server.post("/v1/embeddings", {"input": texts})
    got = vectors(response)
    assert [d["index"] for d in response.json()["data"]] == list(range(9))
    for text, vector in zip(texts, got, strict=True):
        (alone,) = vectors(server.post("/v1/embeddings", {"input": text}))
        assert np.array_equal(vector, alone)
    slots = {task["id_task"] for task in server.get("/slots").json() if "id_task" in task}
    assert len(slots) == 4  # each slot had one
    total = sum(len(ids_of(server, text)) for text in texts)
    assert response.json()["usage"]["prompt_tokens"] == total


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("", 1), ("string", 1), ([12, 34, 56], 1), ([12, 34, "string", 56, 78], 1),
        (["string1", "string2"], 2), (["string1", [12, 34, 56]], 2),
        ([[12, 34, 56], [12, 34, 56]], 2), ([[12, 34, 56], [12, "string", 34, 56]], 2),
        ({"prompt_string": "string"}, 1), ({"content": [{"type": "text", "text": "string"}]}, 1),
        (["a", {"prompt_string": "b"}, {"content": [{"type": "text", "text": "c"}]}], 3),
    ],
)  # fmt: skip
def test_inputs_have_every_shape_that_prompts_have(server, given, prompts):
    assert len(vectors(server.post("/v1/embeddings", {"input": given}))) == prompts


def test_tokens_and_parts_are_the_text_that_they_are_of(server):
    parts = {"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}
    forms = ["hello world", parts, {"prompt_string": "hello world"}, ids_of(server, "hello world")]
    got = vectors(server.post("/v1/embeddings", {"input": forms}))
    assert all(np.array_equal(vector, got[0]) for vector in got)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ([], 400), (None, 400), (5, 400), (True, 400), ([[]], 400), ([None], 400), ([1e9], 400),
        ({"content": "string"}, 400), ({"content": [{"type": "unknown"}]}, 400),
        ({"content": [{"type": "text"}]}, 400), ({"content": [7]}, 400),
        ({"content": [{"type": "text", "text": 7}]}, 400), ({"other": 1}, 400),
        ({"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, 501),
        ({"content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}, 501),
        ({"prompt_string": "a", "multimodal_data": ["AAAA"]}, 501),
    ],
)  # fmt: skip
def test_inputs_of_no_shape_are_refused(server, given, status):
    for path in ("/v1/embeddings", "/embedding"):
        error(server.post(path, {"input": given}), status)


def test_a_body_without_an_input_is_refused(server):
    assert error(server.post("/v1/embeddings", {}), 400)["message"] == (
        '"input" or "content" must be provided'
    )
    error(server.http.post("/v1/embeddings", content=b"{"), 500)


def test_base64_has_the_bytes_of_the_floats(server):
    (want,) = vectors(server.post("/v1/embeddings", {"input": TEXT}))
    response = server.post("/v1/embeddings", {"input": TEXT, "encoding_format": "base64"})
    (item,) = response.json()["data"]
    assert item["encoding_format"] == "base64"
    assert base64.b64decode(item["embedding"]) == want.astype("<f4").tobytes()
    message = error(server.post("/v1/embeddings", {"input": "a", "encoding_format": "hex"}), 400)
    assert "encoding_format" in message["message"] and "base64" in message["message"]


def test_llama_servers_form_has_a_list_of_vectors_for_each_input(server):
    (want,) = vectors(server.post("/v1/embeddings", {"input": TEXT}))
    for path, name in (("/embedding", "content"), ("/embeddings", "input")):
        body = server.post(path, {name: TEXT}).json()
        assert [sorted(item) for item in body] == [["embedding", "index"]]
        assert np.array_equal(np.array(body[0]["embedding"], dtype=np.float32), want[None])
    # Their name of the field asks for their form, on OpenAI's path too.
    assert server.post("/v1/embeddings", {"content": TEXT}).json() == body
    two = server.post("/embedding", {"content": ["a", "b"]}).json()
    assert [item["index"] for item in two] == [0, 1]


def test_without_pooling_each_token_has_its_own_vector_as_it_is(make_server):
    server = make_server(embeds=True, pooling=Pooling.NONE)
    ids = ids_of(server, TEXT)
    body = server.post("/embedding", {"content": TEXT, "embd_normalize": 2}).json()
    got = np.array(body[0]["embedding"], dtype=np.float32)
    assert np.array_equal(got, raw(server, ids, Pooling.NONE)) and len(got) == len(ids)
    refused = error(server.post("/v1/embeddings", {"input": TEXT}), 400)
    assert "not OAI compatible" in refused["message"]


def test_a_large_answer_is_written_beside_the_event_loop_and_is_the_same(make_server, monkeypatch):
    server = make_server(embeds=True, pooling=Pooling.NONE)
    want = server.post("/embedding", {"content": TEXT}).json()
    monkeypatch.setattr(embeddings, "BLOCKING_VALUES", 0)
    assert server.post("/embedding", {"content": TEXT}).json() == want


@pytest.mark.parametrize("norm", [-1, 0, 1, 2, 3, 7])
def test_a_body_chooses_how_the_vector_is_normalised(server, norm):
    (want,) = raw(server, ids_of(server, TEXT)).astype(float)
    scale = {-1: 1.0, 0: np.abs(want).max() / 32760}.get(norm) or np.linalg.norm(want, norm)
    (got,) = vectors(server.post("/v1/embeddings", {"input": TEXT, "embd_normalize": norm}))
    np.testing.assert_allclose(got, want / scale, rtol=2e-7)  # float32 again


@pytest.mark.parametrize("norm", [-2, 1.5, "2", True])
def test_a_normalisation_that_is_none_is_refused(server, norm):
    assert (
        "embd_normalize"
        in error(server.post("/v1/embeddings", {"input": "a", "embd_normalize": norm}), 400)[
            "message"
        ]
    )


@given(st.lists(FLOATS, min_size=1, max_size=20), st.integers(1, 1 << 40))
def test_a_normalised_vector_is_finite_whatever_the_norm_and_the_numbers(numbers, norm):
    got = normalized(np.array(numbers, dtype=np.float32), norm)
    assert np.isfinite(got).all() and np.abs(got).max() <= 1.0
    assert np.abs(got).max() > 0 or not any(numbers)


def test_zeros_stay_zeros():
    for norm in (-1, 0, 1, 2):
        assert not normalized(np.zeros(4, dtype=np.float32), norm).any()


def test_only_the_models_own_number_of_dimensions_is_there(server):
    size = server.state.ready.model.hidden_size
    (vector,) = vectors(server.post("/v1/embeddings", {"input": "a", "dimensions": size}))
    assert len(vector) == size
    refused = error(server.post("/v1/embeddings", {"input": "a", "dimensions": 8}), 501)
    assert refused["type"] == "not_supported_error" and str(size) in refused["message"]
    error(server.post("/v1/embeddings", {"input": "a", "dimensions": 0}), 400)
    error(server.post("/v1/embeddings", {"input": "a", "dimensions": "8"}), 400)


def test_an_input_that_is_too_long_names_both_lengths_and_ends_nothing_else(server):
    refused = error(server.post("/v1/embeddings", {"input": ["a", "b" * 300]}), 400)
    assert refused["type"] == "exceed_context_size_error"
    assert (refused["n_prompt_tokens"], refused["n_ctx"]) == (300, 256)
    assert "input (300 tokens) is too large" in refused["message"]
    assert len(vectors(server.post("/v1/embeddings", {"input": "b" * 255}))) == 1


def test_more_inputs_than_may_wait_are_refused_at_once(make_server):
    server = make_server(embeds=True, max_waiting=3)
    assert "at most 5" in error(server.post("/v1/embeddings", {"input": ["a"] * 6}), 400)["message"]
    assert len(vectors(server.post("/v1/embeddings", {"input": ["a"] * 5}))) == 5


def test_a_server_without_embeddings_says_how_to_get_them(make_server):
    for path in ("/v1/embeddings", "/embedding", "/embeddings"):
        refused = error(make_server().post(path, {"input": "a"}), 501)
        assert refused["type"] == "not_supported_error" and "--embeddings" in refused["message"]


def test_hidden_states_that_are_no_numbers_are_an_error_and_no_JSON(server, monkeypatch):
    from graphseed.engine.pooling import Embedding

    def take(self, hidden, is_last, own=Embedding.take):
        return own(self, hidden * float("nan"), is_last)

    monkeypatch.setattr(Embedding, "take", take)
    assert (
        "no finite numbers" in error(server.post("/v1/embeddings", {"input": "a"}), 500)["message"]
    )


@pytest.mark.anyio
async def test_a_client_that_goes_away_frees_its_slots(make_server):
    server = make_server(embeds=True, num_parallel=1, context_len=4096, num_ubatch=16)
    async with server.client() as http:
        body = {"input": ["a" * 3000] * 20}
        asked = asyncio.create_task(http.post("/v1/embeddings", json=body))
        while not server.engine.core.scheduler.sequences:
            await asyncio.sleep(0.01)
        asked.cancel()
        until = time.monotonic() + 2.0
        while server.engine.core.scheduler.sequences:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        response = await http.post("/v1/embeddings", json={"input": "a"})
        assert response.status_code == 200


@pytest.mark.parametrize("policy", ["seed", "resident"])
def test_embeddings_are_the_same_under_every_policy(make_server, policy):
    texts = ["a" * n for n in (3, 40, 100)] * 2
    want = vectors(make_server(embeds=True).post("/v1/embeddings", {"input": texts}))
    server = make_server(policy=policy, embeds=True)
    for _ in range(2):
        got = vectors(server.post("/v1/embeddings", {"input": texts}))
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
