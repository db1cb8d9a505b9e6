"""Saved K/V: out of one engine, through a file, into another, byte for byte."""

import copy
import dataclasses
import json
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from graphseed.capture import DeviceLost, Namespace
from graphseed.engine import (
    BadParameter,
    Engine,
    EngineConfig,
    EngineCore,
    Pooling,
    SamplingParams,
    transfer,
)
from graphseed.engine.blocks import BlockPool, BlockTable, OutOfBlocks, chain_digests
from graphseed.engine.errors import EngineBusy
from graphseed.engine.record import BadRecord, PlanRecorder, replay
from graphseed.engine.saved import BadSave, SavedPrefix, read_file, write_file
from graphseed.engine.step import StepTrace
from graphseed.engine.transfer import forget_prefix, layout_of, put_prefix, take_prefix
from tests.engine.conftest import SELECTIONS, driver_of, model_of, prompt_of

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def open_engine(device):
    opened = []

    def make(policy="seed", preset="tiny-llama", dtype="fp32", **sizes):
        driver = driver_of(device)
        config = EngineConfig(**{"context_len": 256, "num_ubatch": 32, "num_parallel": 2, **sizes})
        core = EngineCore(
            model_of(preset, driver.device, dtype), driver, config, SELECTIONS[policy]
        )
        opened.append(Engine(core))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def answer(engine, prompt, params=PARAMS):
    """A finished request, the logits of its steps, and the digest of all its K/V."""
    trace, last = StepTrace(engine.core.driver), None
    engine.call(lambda: setattr(engine.core, "observer", trace))
    for delta in engine.submit(prompt, params, kv_digest=True):
        last = delta
    engine.call(lambda: setattr(engine.core, "observer", None))
    return last.request, [row.cpu() for row in trace.logits], last.kv_digest


def known(request):
    return (*request.prompt_ids, *request.output_ids)


def num_found(engine, tokens):
    """Tokens that a prompt of them and one more would find cached."""

    def look():
        table = BlockTable(engine.core.pool, engine.core.config.max_blocks)
        found = table.match_prefix([*tokens, 0])
        table.close()
        return found

    return engine.call(look)


def saved_of(engine, num_tokens=70, seed=0):
    """What an engine has of a prompt that it has answered."""
    request, _, _ = answer(engine, prompt_of(num_tokens, seed))
    return take_prefix(engine, known(request))


def is_equal(a, b):
    same = (a.layout, a.token_ids) == (b.layout, b.token_ids)
    return same and all(torch.equal(x, y) for x, y in zip(a.rows, b.rows, strict=True))


@pytest.mark.parametrize(
    ("policy", "preset", "dtype"),
    [
        ("off", "tiny-llama", "fp32"), ("seed", "tiny-llama", "fp32"),
        ("resident", "tiny-llama", "fp32"), ("seed", "tiny-gemma3", "fp32"),
        ("seed", "tiny-llama", "bf16"),
    ],
)  # fmt: skip
def test_I9_an_answer_after_a_restore_is_the_bytes_of_one_with_the_prefix_cache(
    open_engine, tmp_path, policy, preset, dtype
):
    old, new = (open_engine(policy, preset, dtype) for _ in range(2))
    first, _, _ = answer(old, prompt_of(70))
    write_file(take_prefix(old, known(first)), tmp_path / "slot")
    longer = [*known(first)[:64], *prompt_of(40, 1)]
    # Another prompt in the new engine: the prefix must not depend on which blocks it gets.
    answer(new, prompt_of(50, 9))
    assert put_prefix(new, read_file(tmp_path / "slot")) == 64
    (want, want_logits, want_kv), (got, got_logits, got_kv) = (
        answer(engine, longer) for engine in (old, new)
    )
    assert want.num_cached == got.num_cached == 64
    assert got.output_ids == want.output_ids and got_kv == want_kv
    assert len(got_logits) == len(want_logits)
    assert all(torch.equal(a, b) for a, b in zip(got_logits, want_logits, strict=True))


def test_I9_a_record_over_a_restored_prefix_is_said_to_lack_it(open_engine, tmp_path):
    saved = saved_of(open_engine())
    engine, path = open_engine(), tmp_path / "plans.jsonl"
    recorder = PlanRecorder(path, engine.core)
    engine.call(lambda: setattr(engine.core, "observer", recorder))
    put_prefix(engine, saved)
    assert list(engine.stream([*saved.token_ids, 1], PARAMS))[-1].request.num_cached == 64
    engine.call(recorder.close)
    with pytest.raises(BadRecord, match="step 0 of .* reads K/V that no recorded step wrote"):
        replay(path, engine.core.model, engine.core.driver)


def test_a_file_brings_back_what_was_written(open_engine, tmp_path):
    saved = saved_of(open_engine())
    assert len(saved.token_ids) == 64 and saved.rows[0].shape[0] == 4
    num_bytes = write_file(saved, tmp_path / "slot")
    assert num_bytes == (tmp_path / "slot").stat().st_size
    assert is_equal(read_file(tmp_path / "slot"), saved)


def test_nothing_known_is_saved_and_restored_as_nothing(open_engine, tmp_path):
    engine = open_engine()
    saved = take_prefix(engine, ())
    write_file(saved, tmp_path / "slot")
    assert put_prefix(engine, read_file(tmp_path / "slot")) == 0


def test_the_copy_is_the_same_in_pieces_of_one_block(open_engine, monkeypatch):
    engine = open_engine()
    whole = saved_of(engine)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1)
    assert is_equal(take_prefix(engine, whole.token_ids), whole)
    other = open_engine()
    assert put_prefix(other, whole) == 64
    assert is_equal(take_prefix(other, whole.token_ids), whole)


def test_what_is_there_already_is_not_written_again(open_engine):
    engine = open_engine()
    saved = saved_of(engine)
    num_free = engine.core.num_free_blocks
    # Had it been written, the engine would have other K/V now.
    zeros = tuple(torch.zeros_like(rows) for rows in saved.rows)
    assert put_prefix(engine, SavedPrefix(saved.layout, saved.token_ids, zeros)) == 64
    assert is_equal(take_prefix(engine, saved.token_ids), saved)
    assert engine.core.num_free_blocks == num_free


def test_what_was_evicted_meanwhile_ends_the_copy(open_engine, monkeypatch):
    engine = open_engine()
    whole = saved_of(engine)
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1)
    read, calls = transfer._read, []

    def read_and_lose(memory, core, digests):
        calls.append(digests)
        if len(calls) == 3:
            core.pool.withdraw(digests[0])
        return read(memory, core, digests)

    monkeypatch.setattr(transfer, "_read", read_and_lose)
    saved = take_prefix(engine, whole.token_ids)
    assert len(calls) == 3 and saved.token_ids == whole.token_ids[:32]
    assert all(torch.equal(a, b[:2]) for a, b in zip(saved.rows, whole.rows, strict=True))


def test_new_weights_meanwhile_end_the_copy_and_refuse_the_restore(open_engine, monkeypatch):
    engine = open_engine()
    whole = saved_of(engine)
    other = open_engine()
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1)
    write, calls = transfer._write, []

    def write_and_change(memory, core, digests, rows):
        calls.append(digests)
        if len(calls) == 3:
            core.weights_changed()
        return write(memory, core, digests, rows)

    monkeypatch.setattr(transfer, "_write", write_and_change)
    with pytest.raises(EngineBusy, match="changed meanwhile"):
        put_prefix(other, whole)
    assert num_found(other, whole.token_ids) == 0
    assert other.core.num_free_blocks == other.core.config.num_blocks - 1
    read = transfer._read

    def read_and_change(memory, core, digests):
        core.weights_changed()
        return read(memory, core, digests)

    monkeypatch.setattr(transfer, "_read", read_and_change)
    assert take_prefix(engine, whole.token_ids).token_ids == ()


def test_streams_go_on_while_a_prefix_is_saved_and_restored(open_engine, monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1)
    engine = open_engine(num_parallel=3)
    saved = saved_of(engine)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = [prompt_of(40, seed) for seed in (7, 8)]
    wanted = [request.output_ids for request in engine.generate(prompts, params)]
    got = []
    runner = threading.Thread(
        target=lambda: got.extend(r.output_ids for r in engine.generate(prompts, params))
    )
    runner.start()
    for _ in range(3):
        forget_prefix(engine, saved.token_ids)
        assert put_prefix(engine, saved) == 64
        assert is_equal(take_prefix(engine, saved.token_ids), saved)
    runner.join(60)
    assert got == wanted
    assert engine.core.num_free_blocks == engine.core.config.num_blocks - 1


def test_a_restore_that_does_not_fit_is_refused_and_changes_nothing(open_engine):
    saved = saved_of(open_engine())
    engine = open_engine(kv_len=256, num_parallel=2)
    handle = engine.submit(prompt_of(200, 3), SamplingParams(max_tokens=56, ignore_eos=True))
    next(handle)
    with pytest.raises(OutOfBlocks, match="4 KV blocks are needed and 3 are free"):
        put_prefix(engine, saved)
    assert num_found(engine, saved.token_ids) == 0
    handle.close()


def test_blocks_that_run_out_half_way_leave_nothing_behind(open_engine, monkeypatch):
    saved = saved_of(open_engine())
    engine = open_engine()
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1)
    write, calls = transfer._write, []

    def write_and_fill(memory, core, digests, rows):
        calls.append(digests)
        if len(calls) == 3:
            core.pool.take(core.pool.num_free)
        return write(memory, core, digests, rows)

    monkeypatch.setattr(transfer, "_write", write_and_fill)
    with pytest.raises(OutOfBlocks):
        put_prefix(engine, saved)
    assert all(engine.core.pool.find(d) is None for d in chain_digests(saved.token_ids, 16))


def test_a_restore_evicts_the_least_recently_used_and_its_end_goes_before_its_beginning(
    open_engine,
):
    saved = saved_of(open_engine())
    engine = open_engine(kv_len=256, num_parallel=1)
    saved_of(engine, 200, seed=5)  # 12 of 16 blocks can be found by it
    assert put_prefix(engine, saved) == 64
    # 208 tokens need 13 blocks: 12 of the older prompt or free, and one that was restored.
    answer(engine, prompt_of(207, 6), SamplingParams(max_tokens=1, ignore_eos=True))
    assert num_found(engine, saved.token_ids) == 48


def test_a_forgotten_prefix_is_computed_again_and_others_stay(open_engine):
    engine = open_engine()
    first, other = prompt_of(70), prompt_of(70, 1)
    want = answer(engine, first)[0]
    answer(engine, other)
    assert answer(engine, first)[0].num_cached == 64
    forget_prefix(engine, known(want))
    again = answer(engine, first)[0]
    assert again.num_cached == 0 and again.output_ids == want.output_ids
    assert answer(engine, other)[0].num_cached == 64
    assert engine.core.num_free_blocks == engine.core.config.num_blocks - 1


def test_a_whole_last_block_of_a_prompt_is_forgotten_too(open_engine):
    engine = open_engine(embeds=True)
    request = engine.core.embedding_request(prompt_of(16), Pooling.LAST)
    for _ in engine.start(request):
        pass
    assert num_found(engine, request.prompt_ids) == 16
    forget_prefix(engine, request.prompt_ids)
    assert num_found(engine, request.prompt_ids) == 0


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"preset": "tiny-qwen3"}, "weights"), ({"dtype": "bf16"}, "dtype"),
        ({"block_len": 32}, "block_len"),
    ],
)  # fmt: skip
def test_K_V_of_another_model_or_another_shape_is_refused(open_engine, other, key):
    saved = saved_of(open_engine())
    engine = open_engine(**other)
    with pytest.raises(
        BadSave, match=f"saved with another {key}: .* of 'random:tiny-llama', and this"
    ):
        put_prefix(engine, saved)
    assert num_found(engine, saved.token_ids) == 0


def test_a_single_weight_or_another_rope_makes_another_model(open_engine, device):
    engine = open_engine()
    saved = saved_of(engine)
    model = engine.core.model
    for change in ("weight", "rope"):
        module = copy.deepcopy(model.module)
        if change == "weight":
            list(module.parameters())[-1].data[..., 0] += 1
        else:
            module.config.rope_parameters["rope_theta"] *= 2
        changed = dataclasses.replace(model, module=module)
        core = EngineCore(changed, driver_of(device), engine.core.config, SELECTIONS["off"])
        with Engine(core) as other, pytest.raises(BadSave, match="weights|positions"):
            put_prefix(other, saved)


def test_what_does_not_fit_a_slot_or_the_vocabulary_is_refused(open_engine):
    saved = saved_of(open_engine())
    with pytest.raises(BadSave, match="64 tokens, which do not fit into a slot of 48"):
        put_prefix(open_engine(context_len=48), saved)
    engine = open_engine()
    for tokens, rows in (
        ((9999, *saved.token_ids[1:]), saved.rows),
        (saved.token_ids[:48], saved.rows),
        (saved.token_ids[:63], saved.rows),
        (saved.token_ids, saved.rows[:-1]),
        (saved.token_ids, tuple(rows.double() for rows in saved.rows)),
    ):
        with pytest.raises(BadSave, match="do not belong together"):
            put_prefix(engine, SavedPrefix(saved.layout, tokens, rows))
    assert num_found(engine, saved.token_ids) == 0


def test_an_engine_that_reuses_no_prefixes_has_none_and_takes_none(open_engine):
    saved = saved_of(open_engine())
    engine = open_engine(reuses_prefixes=False)
    assert saved_of(engine).token_ids == ()
    with pytest.raises(BadParameter, match="reuses_prefixes"):
        put_prefix(engine, saved)


@pytest.mark.parametrize("place", ["begin", "header", "token_ids", "middle", "end"])
def test_a_flipped_bit_is_found_wherever_it_is(open_engine, tmp_path, place):
    path = tmp_path / "slot"
    write_file(saved_of(open_engine()), path)
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    at = {
        "begin": 0, "header": data.index(b"weights") + 15, "token_ids": data.index(b"token_ids"),
        "middle": (header + len(data)) // 2, "end": len(data) - 1,
    }[place]  # fmt: skip
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadSave):
        read_file(path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_cut_file_is_refused(open_engine, tmp_path, keep):
    path = tmp_path / "slot"
    write_file(saved_of(open_engine()), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadSave, match="damaged, or no saved slot"):
        read_file(path)


def test_files_of_other_kinds_are_refused(open_engine, tmp_path):
    path = tmp_path / "slot"
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(BadSave, match="format is 'none'"):
        read_file(path)
    write_file(saved_of(open_engine()), path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, {**metadata, "format": "graphseed prefix 2"})
    with pytest.raises(BadSave, match="'graphseed prefix 2'; expected 'graphseed prefix 1'"):
        read_file(path)
    with pytest.raises(OSError):
        read_file(tmp_path / "none")


def test_a_layout_is_JSON_and_names_what_K_V_depends_on(open_engine):
    engine = open_engine()
    layout = engine.call(lambda: layout_of(engine.core))
    assert json.loads(json.dumps(layout)) == layout
    assert layout["dtype"] == "float32" and layout["block_len"] == 16
    assert len(layout["layers"]) == len(engine.core.model.layers)
    assert "rope_theta" in json.dumps(layout["positions"])


def test_an_error_of_the_device_ends_the_engine_and_not_in_silence(open_engine):
    engine = open_engine()

    def lose():
        raise DeviceLost("it is gone")

    with pytest.raises(DeviceLost):
        engine.call(lambda: engine.core.on_device("a test", lose))
    with pytest.raises(DeviceLost):
        engine.generate([prompt_of(4)], PARAMS)


def test_a_withdrawn_block_stays_its_holders_and_comes_back_free():
    pool = BlockPool(6, 16)
    tokens = list(range(48))
    table = BlockTable(pool, 8)
    table.grow(48)
    table.publish(tokens, 48)
    digests = chain_digests(tokens, 16)
    assert [pool.find(d) for d in digests] == table.ids.tolist()
    pool.withdraw(digests[1])
    pool.withdraw(digests[1])
    other = BlockTable(pool, 8)
    assert other.match_prefix([*tokens, 0]) == 16
    other.close()
    assert pool.num_free == 2
    table.close()
    assert pool.num_free == 5
    pool.withdraw(digests[0])  # idle now
    assert pool.num_free == 5 and pool.find(digests[0]) is None
    assert len(set(pool.take(5))) == 5
    assert pool.find(digests[2]) is None  # evicted


def test_replays_see_what_a_restore_wrote(open_engine):
    """KV memory is a binding: writing into it makes no recording stale and is seen by the next."""
    engine = open_engine("seed", num_ubatch=16)
    saved = saved_of(engine, 70)
    want, _, want_kv = answer(engine, [*saved.token_ids, *prompt_of(32, 2)])
    forget_prefix(engine, known(want))
    answer(engine, prompt_of(100, 4))
    assert put_prefix(engine, saved) == 64
    stale = engine.core.tally.counts[Namespace.PROMPT].stale
    before = engine.core.tally.counts[Namespace.PROMPT].replayed
    got, _, got_kv = answer(engine, [*saved.token_ids, *prompt_of(32, 2)])
    assert got.num_cached == want.num_cached == 64
    assert got.output_ids == want.output_ids and got_kv == want_kv
    counts = engine.core.tally.counts[Namespace.PROMPT]
    assert counts.stale == stale and counts.replayed > before
