"""Slots saved, restored and erased: what becomes of files, and what prompts find then."""

import asyncio
import os

import pytest
import torch

from graphseed.capture import Closed
from graphseed.engine import SamplingParams
from graphseed.engine.saved import read_file
from graphseed.server.errors import Failed, InvalidRequest, NotSupported, Unavailable
from graphseed.server.slots import slot_files
from graphseed.server.slots.slot_files import SlotFiles, is_file_name

PROMPT = "What is the capital of France? It has a tower and a river, and much bread."
OTHER = "Whereas the capital of Germany is another one, on another river, with a gate."


class Slots:
    """A server and its slots' files, asked one action at a time."""

    def __init__(self, server):
        self.server = server
        self.files = SlotFiles(server.state, server.lifecycle.ledger)

    def complete(self, prompt, slot, num=12, **more):
        body = {"prompt": prompt, "id_slot": slot, "n_predict": num, "temperature": 0.0}
        response = self.server.post("/completion", {**body, "ignore_eos": True, **more})
        assert response.status_code == 200, response.text
        return response.json()

    def save(self, slot, filename):
        return asyncio.run(self.files.save(slot, filename))

    def restore(self, slot, filename):
        return asyncio.run(self.files.restore(slot, filename))

    def erase(self, slot):
        return asyncio.run(self.files.erase(slot))


@pytest.fixture
def open_slots(make_server, tmp_path):
    def make(**more):
        return Slots(make_server(**{"slot_save_path": tmp_path, **more}))

    return make


@pytest.fixture
def slots(open_slots):
    return open_slots()


def whole(num_tokens):
    return num_tokens // 16 * 16


def test_a_slot_is_saved_and_restored_into_a_fresh_server(open_slots, tmp_path):
    old, new = open_slots(), open_slots()
    encode = old.server.engine.core.model.encode
    first = old.complete(PROMPT, 1, return_tokens=True)
    num_known = len(encode(PROMPT)) + 12
    saved = old.save(1, "slot1.bin")
    assert saved["n_saved"] == whole(num_known - 1)  # the last token was not run
    assert saved["n_written"] == (tmp_path / "slot1.bin").stat().st_size
    assert (saved["id_slot"], saved["filename"]) == (1, "slot1.bin")
    assert saved["timings"]["save_ms"] > 0
    restored = new.restore(0, "slot1.bin")
    assert restored.pop("timings")["restore_ms"] > 0
    assert restored == {
        "id_slot": 0, "filename": "slot1.bin", "n_restored": saved["n_saved"],
        "n_read": saved["n_written"],
    }  # fmt: skip
    longer = [*encode(PROMPT), *first["tokens"], *encode(OTHER)]
    want, got = (slots.complete(longer, 0, return_tokens=True) for slots in (old, new))
    assert got["timings"]["cache_n"] == want["timings"]["cache_n"] == saved["n_saved"]
    assert got["content"] == want["content"] and got["tokens"] == want["tokens"]


def test_what_is_restored_is_found_by_the_prompts_of_every_slot(slots):
    slots.complete(PROMPT, 1)
    saved = slots.save(1, "a")
    slots.erase(1)
    assert slots.complete(PROMPT, 1, cache_prompt=False)["timings"]["cache_n"] == 0
    slots.erase(1)
    slots.restore(0, "a")
    for slot in (1, 0):
        got = slots.complete(PROMPT, slot)["timings"]["cache_n"]
        assert 0 < got <= saved["n_saved"]


def test_a_restored_slot_knows_its_tokens_until_it_gets_a_request(open_slots, tmp_path):
    old, slots = open_slots(), open_slots()
    old.complete(PROMPT, 1)
    saved = old.save(1, "a")
    slots.restore(0, "a")
    again = slots.save(0, "b")
    assert (again["n_saved"], again["n_written"]) == (saved["n_saved"], saved["n_written"])
    slots.complete(OTHER, 0)
    slots.save(0, "c")
    a, b, c = (read_file(tmp_path / name) for name in "abc")
    assert a.token_ids == b.token_ids != c.token_ids
    assert all(torch.equal(one, other) for one, other in zip(a.rows, b.rows, strict=True))


def test_an_erased_slot_computes_its_prompt_again_and_others_do_not(slots):
    first = slots.complete(PROMPT, 1)
    slots.complete(OTHER, 0)
    num_known = first["tokens_evaluated"] + 12
    assert slots.erase(1) == {"id_slot": 1, "n_erased": num_known}
    assert slots.erase(1) == {"id_slot": 1, "n_erased": 0}
    again = slots.complete(PROMPT, 1)
    assert again["timings"]["cache_n"] == 0
    assert again["timings"]["prompt_n"] == first["timings"]["prompt_n"]
    assert again["content"] == first["content"]
    assert slots.complete(OTHER, 0)["timings"]["cache_n"] > 0


def test_a_restored_slot_can_be_erased(open_slots):
    old, slots = open_slots(), open_slots()
    old.complete(PROMPT, 1)
    num_saved = old.save(1, "a")["n_saved"]
    slots.restore(0, "a")
    assert slots.erase(0)["n_erased"] == num_saved
    assert slots.complete(PROMPT, 0)["timings"]["cache_n"] == 0


def test_a_fresh_slot_is_saved_and_restored_as_nothing(slots):
    assert slots.save(1, "empty")["n_saved"] == 0
    assert slots.restore(1, "empty")["n_restored"] == 0
    assert slots.erase(1)["n_erased"] == 0


@pytest.mark.parametrize("action", ["save", "restore", "erase"])
def test_a_slot_that_answers_is_left_alone(slots, action):
    slots.complete(PROMPT, 1)
    slots.save(1, "a")
    engine = slots.server.engine
    request = engine.core.request([65] * 8, SamplingParams(max_tokens=200, ignore_eos=True))
    request.wanted_slot = 1
    handle = engine.start(request)
    next(handle)
    with pytest.raises(Unavailable, match="slot 1 is answering a request") as caught:
        getattr(slots, action)(*((1,) if action == "erase" else (1, "a")))
    assert "Retry-After" in caught.value.headers
    handle.close()


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "a/b", "../a", "/etc/passwd", "a\\b", "C:a", "a..b", "a.", " a", "a ", "a\n",
        "a\0b", "a*", "a?", 'a"', "a<", "a>", "a|", "a\x7f", "a\x85", "\uff0e\uff0e", "a\u2215b",
        "a\u2216b", "\ufeffa", "a\ufffd", "\ud800", "a" * 256, "\u00e4" * 128,
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(slots, name, tmp_path):
    assert not is_file_name(name)
    for act in (slots.save, slots.restore):
        with pytest.raises(InvalidRequest, match="Invalid filename"):
            act(0, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["slot1.bin", ".hidden", "a b", "\u00e4" * 127, "a" * 255, "~", "-"]
)
def test_other_names_are_files_in_the_folder(slots, name, tmp_path):
    assert is_file_name(name)
    slots.save(0, name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    slots.restore(0, name)


def test_a_link_is_not_followed_and_is_replaced_by_a_save(slots, tmp_path):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    slots.save(0, "a")
    (tmp_path / "a").rename(outside)
    (tmp_path / "a").symlink_to(outside)
    with pytest.raises(InvalidRequest, match="no regular file"):
        slots.restore(0, "a")
    before = outside.read_bytes()
    slots.complete(PROMPT, 0)
    slots.save(0, "a")
    assert not (tmp_path / "a").is_symlink() and outside.read_bytes() == before
    assert slots.restore(0, "a")["n_restored"] > 0


def test_what_is_no_saved_slot_is_refused(slots, tmp_path):
    with pytest.raises(InvalidRequest, match="Unable to restore slot: there is no such file"):
        slots.restore(0, "none")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("folder", "fifo"):
        with pytest.raises(InvalidRequest, match="no regular file"):
            slots.restore(0, name)
    with pytest.raises(InvalidRequest, match="no regular file"):
        slots.save(0, "folder")
    (tmp_path / "text").write_text("no slot at all")
    with pytest.raises(InvalidRequest, match="Unable to restore slot: the file is damaged"):
        slots.restore(0, "text")


def test_another_models_file_is_refused_and_the_server_goes_on(open_slots):
    old, slots = open_slots(preset="tiny-qwen3"), open_slots()
    old.complete(PROMPT, 0)
    old.save(0, "a")
    with pytest.raises(InvalidRequest, match="another .* of 'random:tiny-qwen3'"):
        slots.restore(0, "a")
    assert slots.complete(PROMPT, 0)["timings"]["cache_n"] == 0


def test_a_save_that_fails_leaves_the_old_file_and_no_draft(slots, tmp_path, monkeypatch):
    slots.complete(PROMPT, 0)
    slots.save(0, "a")
    before = (tmp_path / "a").read_bytes()

    def full(saved, path):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(slot_files, "write_file", full)
    with pytest.raises(Failed, match="^Unable to save slot: No space left on device$"):
        slots.save(0, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == before


def test_a_restore_that_does_not_fit_now_can_be_tried_again(open_slots):
    old, slots = open_slots(), open_slots(kv_len=256)
    old.complete(PROMPT, 0)
    num_saved = old.save(0, "a")["n_saved"]
    engine = slots.server.engine
    handle = engine.submit([65] * 200, SamplingParams(max_tokens=50, ignore_eos=True))
    next(handle)
    with pytest.raises(Unavailable, match="KV blocks are needed") as caught:
        slots.restore(1, "a")
    assert "Retry-After" in caught.value.headers
    handle.close()
    assert slots.restore(1, "a")["n_restored"] == num_saved


def test_a_server_that_caches_no_prompts_says_so(open_slots):
    slots = open_slots(caches_prompts=False)
    for act in (slots.save, slots.restore):
        with pytest.raises(NotSupported, match="--cache-prompt"):
            act(0, "a")
    assert slots.erase(0)["n_erased"] == 0


def test_a_server_without_a_folder_says_how_to_get_one(open_slots):
    slots = open_slots(slot_save_path=None)
    for act in (slots.save, slots.restore):
        with pytest.raises(NotSupported, match="--slot-save-path"):
            act(0, "a")


def test_actions_at_once_are_done_one_after_the_other(slots, tmp_path):
    slots.complete(PROMPT, 0)
    slots.complete(OTHER, 1)

    async def all_at_once():
        files = slots.files
        await asyncio.gather(*(files.save(n % 2, "same") for n in range(6)))
        await asyncio.gather(*(files.restore(n % 2, "same") for n in range(6)))

    asyncio.run(all_at_once())
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


def test_an_engine_that_has_ended_is_told(slots):
    slots.server.engine.close()
    with pytest.raises(Closed):
        slots.save(0, "a")


def test_the_routes_of_slots_act_on_files(slots, tmp_path):
    post = slots.server.post
    slots.complete(PROMPT, 1)
    saved = post("/slots/1?action=save", {"filename": "a.bin"})
    assert saved.status_code == 200 and saved.json()["n_saved"] > 0
    erased = slots.server.http.post("/slots/1?action=erase")
    assert erased.json()["n_erased"] > saved.json()["n_saved"]
    assert slots.complete(PROMPT, 1, num=1)["timings"]["cache_n"] == 0
    slots.server.http.post("/slots/1?action=erase")
    restored = post("/slots/0?action=restore", {"filename": "a.bin"})
    assert restored.json()["n_restored"] == saved.json()["n_saved"]
    assert slots.complete(PROMPT, 1)["timings"]["cache_n"] > 0
    for body in ({"filename": "../a.bin"}, {"filename": 7}, {}):
        refused = post("/slots/1?action=save", body)
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    (tmp_path / "a.bin").write_bytes(b"damaged")
    refused = post("/slots/0?action=restore", {"filename": "a.bin"})
    assert refused.status_code == 400
    assert "Unable to restore slot" in refused.json()["error"]["message"]
