"""/health, /models and /props, loading, awake and asleep."""

import pytest


def test_health_says_ok(server):
    for path in ("/health", "/v1/health"):
        assert server.get(path).json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/health", "/props", "/models", "/completion", "/nothing"])
def test_every_path_says_that_the_model_is_loading(make_server, path):
    server = make_server(is_loaded=False)
    response = server.get(path)
    assert response.status_code == 503
    assert response.json()["error"] == {
        "code": 503, "message": "Loading model", "type": "unavailable_error",
    }  # fmt: skip


def test_every_path_says_that_the_server_ends(server):
    server.state.is_closing = True
    for path in ("/health", "/props", "/nothing"):
        response = server.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the server is shutting down"


def test_a_model_has_its_aliases_and_tags_and_the_first_alias_of_the_alphabet_as_id(make_server):
    server = make_server(aliases=("tinyllama-2", "fim", "code"), tags=("chat", "small"))
    for path in ("/models", "/v1/models"):
        body = server.get(path).json()
        assert body["object"] == "list" and len(body["data"]) == len(body["models"]) == 1
        model = body["data"][0]
        assert model["id"] == "code" and body["models"][0]["name"] == "code"
        assert set(model["aliases"]) == {"tinyllama-2", "fim", "code"}
        assert set(model["tags"]) == {"chat", "small"}
        meta = model["meta"]
        assert meta["n_ctx"] == 256 and meta["n_vocab"] == server.state.ready.model.vocab_size
        assert meta["n_params"] == server.state.ready.model.num_parameters
        assert meta["ftype"] == "all F32" and meta["size"] == 4 * meta["n_params"]


def test_a_model_without_aliases_has_its_own_name(server):
    assert server.get("/models").json()["data"][0]["id"] == "tiny.gguf"


def test_props_tell_what_a_client_of_llama_server_asks_for(make_server):
    server = make_server(has_metrics=True, has_slots=False, has_ui=False)
    props = server.get("/props").json()
    assert props["total_slots"] == 2 and props["model_path"] == "tiny.gguf"
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["default_generation_settings"]["params"]["seed"] == 0
    assert props["build_info"] == "b0-test" and props["is_sleeping"] is False
    assert props["endpoint_metrics"] and not props["endpoint_slots"] and not props["ui"]
    assert props["bos_token"] and props["eos_token"]


def test_I10_props_tell_the_policy_what_selected_it_and_the_summary(make_server):
    server = make_server(policy="seed")
    server.post("/completion", {"prompt": "x" * 80, "n_predict": 1, "cache_prompt": False})
    graphs = server.get("/props").json()["prompt_graphs"]
    assert graphs["policy"] == "seed" and graphs["selected_by"] == "test"
    assert graphs["decode_graphs"] is True and graphs["warnings"] == []
    prompt, decode = graphs["summary"]
    assert prompt.startswith("prompt graphs: device=cpu candidates=3 seeded=2 replayed=1")
    assert decode.startswith("decode graphs: device=cpu")


def test_props_change_only_where_that_was_allowed(make_server):
    refused = make_server().post("/props", {})
    assert refused.status_code == 501
    assert refused.json()["error"]["type"] == "not_supported_error"
    assert make_server(has_props=True).post("/props", {}).json() == {"success": True}


def test_the_chat_template_in_use_is_told_with_what_it_can_do(make_server):
    own = make_server().get("/props").json()
    assert "<|im_start|>" in own["chat_template"]  # the model has none: llama-server's default
    assert own["chat_template_caps"]["supports_system_role"] is True
    given = make_server(chat_template="{{ messages[0].content }}").get("/props").json()
    assert given["chat_template"] == "{{ messages[0].content }}"
    assert given["chat_template_caps"]["supports_tools"] is False
