"""/slots and the ledger behind it."""

import asyncio

import pytest

from graphseed.engine import QueueFull, Request, SamplingParams, Status
from graphseed.server.ledger import Ledger
from graphseed.server.slots.endpoint import busy_slots


def ended(slot, num_prompt=4):
    request = Request(tuple(range(num_prompt)), SamplingParams(), slot=slot)
    request.status = Status.FINISHED
    return request


def test_fresh_slots_have_four_fields(server):
    slots = server.get("/slots").json()
    assert slots == [
        {"id": number, "n_ctx": 256, "speculative": False, "is_processing": False}
        for number in range(2)
    ]


def test_slots_can_be_kept_to_oneself(make_server):
    response = make_server(has_slots=False).get("/slots")
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"


def test_a_slot_remembers_its_last_request_and_has_no_budget_left_of_it(server):
    server.post("/completion", {"prompt": "one", "n_predict": 3, "id_slot": 1})
    server.post("/completion", {"prompt": "three!", "n_predict": 3, "id_slot": 1, "seed": 7})
    fresh, used = server.get("/slots").json()
    assert "params" not in fresh and used["is_processing"] is False
    assert used["id_task"] == 1 and used["n_prompt_tokens"] == 6
    assert used["params"]["seed"] == 7
    assert used["next_token"] == [
        {"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}
    ]


@pytest.mark.anyio
async def test_slots_are_busy_while_requests_run_and_free_when_they_are_given_up(make_server):
    server = make_server(num_parallel=1)
    engine = server.engine
    request = engine.core.request([65] * 8, SamplingParams(max_tokens=200, ignore_eos=True))
    deltas = engine.aread(request)
    await anext(deltas)
    async with server.client() as http:
        (slot,) = (await http.get("/slots")).json()
        assert slot["is_processing"] and slot["next_token"][0]["has_next_token"]
        assert 0 < slot["next_token"][0]["n_remain"] < 200
        full = await http.get("/slots?fail_on_no_slot=1")
        assert full.status_code == 503 and "retry-after" in full.headers
        assert full.json()["error"]["message"] == "no slot available"
        assert server.lifecycle.ledger.num_open == 1
        await deltas.aclose()
        assert server.lifecycle.ledger.num_open == 0
        for _ in range(100):
            if not await busy_slots(engine):
                break
            await asyncio.sleep(0.02)
        (slot,) = (await http.get("/slots?fail_on_no_slot=1")).json()
        assert not slot["is_processing"]


def test_an_action_needs_a_folder_a_slot_and_a_verb(make_server, tmp_path):
    assert make_server().post("/slots/0?action=erase", {}).status_code == 501
    server = make_server(slot_save_path=tmp_path)
    for path, words in (
        ("/slots/2?action=erase", "Invalid slot ID '2'; expected 0 to 1"),
        ("/slots/-1?action=erase", "Invalid slot ID"),
        ("/slots/x?action=erase", "Invalid slot ID"),
        ("/slots/99999999999999999999?action=erase", "Invalid slot ID"),
        ("/slots/0", "action is ''; expected save, restore or erase"),
        ("/slots/0?action=save", "filename is not given"),
        ("/slots/0?action=restore", "filename is not given"),
        ("/slots/0?action=burn", "action is 'burn'"),
    ):
        response = server.post(path, {})
        assert response.status_code == 400 and words in response.json()["error"]["message"]
    escaping = server.post("/slots/0?action=save", {"filename": "../x"})
    assert escaping.status_code == 400
    assert escaping.json()["error"]["message"] == "Invalid filename"


def test_what_a_slot_knows_goes_to_a_file_and_comes_back_into_another(make_server, tmp_path):
    server = make_server(slot_save_path=tmp_path)
    body = {"prompt": "x" * 40, "n_predict": 2, "id_slot": 1, "temperature": 0}
    first = server.post("/completion", body).json()
    saved = server.post("/slots/1?action=save", {"filename": "a.bin"}).json()
    assert saved["id_slot"] == 1 and saved["n_saved"] > 0
    assert saved["n_written"] == (tmp_path / "a.bin").stat().st_size
    anew = make_server(slot_save_path=tmp_path)
    restored = anew.post("/slots/0?action=restore", {"filename": "a.bin"}).json()
    assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
    again = anew.post("/completion", {**body, "id_slot": 0}).json()
    assert again["timings"]["cache_n"] == 32 and again["content"] == first["content"]


def test_an_erased_slot_computes_the_same_prompt_again(make_server, tmp_path):
    server = make_server(slot_save_path=tmp_path)
    body = {"prompt": "x" * 40, "n_predict": 2, "id_slot": 1, "temperature": 0}
    first = server.post("/completion", body).json()
    again = server.post("/completion", body).json()
    assert first["timings"]["prompt_n"] == 40 and again["timings"]["cache_n"] == 32
    erased = server.post("/slots/1?action=erase", {}).json()
    assert erased["id_slot"] == 1 and erased["n_erased"] > 0
    anew = server.post("/completion", body).json()
    assert anew["timings"]["prompt_n"] == 40 and anew["content"] == first["content"]
    assert server.post("/slots/0?action=erase", {}).json() == {"id_slot": 0, "n_erased": 0}


def test_a_ledger_keeps_what_is_open_and_the_last_of_each_slot_and_no_more():
    ledger = Ledger()
    waiting = Request((1,), SamplingParams())
    ledger.enter(waiting)
    for number in range(1000):
        ledger.enter(ended(number % 3, num_prompt=number + 1))
    assert len(ledger._tasks) <= 200
    assert ledger.num_open == 1
    assert [len(ledger.last_of_slot(slot).request.prompt_ids) for slot in range(3)] == [
        1000, 998, 999,
    ]  # fmt: skip
    assert ledger.last_of_slot(3) is None


@pytest.mark.anyio
async def test_a_refused_request_is_not_open(make_server):
    server = make_server(num_parallel=1, max_waiting=0)
    engine = server.engine
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    running = engine.aread(engine.core.request([65] * 8, params))
    await anext(running)
    with pytest.raises(QueueFull):
        engine.aread(engine.core.request([65] * 8, params))
    assert server.lifecycle.ledger.num_open == 1
    await running.aclose()
