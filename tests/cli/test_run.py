"""`graphseed run`: its answer, its log, its selectors and its errors."""

import pytest

from tests.cli.conftest import TINY, in_own_process

SEED = "GGML_CUDA_PROMPT_GRAPH_CAPTURE_SEED"
DISABLE = "GGML_CUDA_DISABLE_GRAPHS"
PROMPT = "a prompt of fifty bytes or so, in several chunks."
LONG = ("-p", PROMPT, "-n", "4", "--temp", "0", "--ignore-eos", "-no-cnv")


def test_I10_the_log_of_a_seeded_run_proves_instantiated_and_replayed():
    done = in_own_process("run", *TINY, *LONG, **{SEED: "1"})
    assert done.returncode == 0, done.stderr
    for line in (
        f"prompt graphs: policy=seed selected by {SEED}=1",
        "prompt graph instantiated, not launched: device=cpu first=aten.embedding[1, 16, 64]",
        "prompt graph replayed for the first time: device=cpu",
        "decode graph instantiated, not launched",
        "decode graph replayed for the first time",
        "prompt graphs released: cause=first batch-one decode graph",
        "prompt graphs: device=cpu candidates=4 seeded=1 replayed=3 direct=1 stale=0 refused=0",
        "decode graphs: device=cpu candidates=3 seeded=1 replayed=2 direct=1",
    ):
        assert line in done.stderr
    assert "alarm" not in done.stderr
    off = in_own_process("run", *TINY, *LONG)
    assert off.returncode == 0
    assert off.stdout == done.stdout  # I9: the same answer
    assert "prompt graph instantiated" not in off.stderr


def test_I12_unset_and_0_capture_no_prompt(cli, caplog, monkeypatch):
    for value in (None, "0"):
        caplog.clear()
        if value is not None:
            monkeypatch.setenv(SEED, value)
        assert cli("run", *LONG) == 0
        assert "policy=off selected by" in caplog.text
        assert "prompt graph instantiated" not in caplog.text
        assert "decode graph instantiated" in caplog.text


def test_a_value_that_means_nothing_is_an_error_at_start(cli, monkeypatch, capsys):
    monkeypatch.setenv(SEED, "yes")
    assert cli("run", *LONG) == 1
    out = capsys.readouterr()
    assert f"error: {SEED}='yes' means nothing; expected 1 (seed) or 0 (off)" in out.err
    assert not out.out


def test_I10_flag_and_variable_that_disagree_are_both_logged_and_the_flag_wins(
    cli, caplog, monkeypatch
):
    monkeypatch.setenv(SEED, "1")
    assert cli("run", *LONG, "--prompt-graphs", "off") == 0
    assert "policy=off selected by --prompt-graphs off" in caplog.text
    assert f"{SEED}=1 asks for seed and --prompt-graphs for off: the flag wins" in caplog.text
    assert "prompt graph instantiated" not in caplog.text


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_I12_disable_turns_every_graph_off_and_says_that_the_selector_has_no_effect(
    value, cli, caplog, monkeypatch
):
    monkeypatch.setenv(SEED, "1")
    monkeypatch.setenv(DISABLE, value)
    assert cli("run", *LONG) == 0
    assert "decode graphs: off" in caplog.text
    assert f"{SEED}=1 has no effect: {DISABLE} is set" in caplog.text
    assert "instantiated" not in caplog.text


def test_I10_a_short_prompt_under_seed_raises_the_alarm_at_the_end(cli, caplog):
    args = ("-p", "short", "-n", "2", "-no-cnv", "--ignore-eos")
    assert cli("run", *args, "--prompt-graphs", "seed") == 0
    assert "1 prompt graphs seeded and none replayed: the identity was not seen again" in (
        caplog.text
    )


def test_I10_resident_captures_beside_the_next_chunk_and_says_so(cli, caplog):
    assert cli("run", *LONG, "--prompt-graphs", "resident") == 0
    assert "prompt graphs: policy=resident" in caplog.text
    assert "candidates=4 seeded=1 replayed=3 direct=1" in caplog.text


def test_the_prompt_can_come_from_a_file(cli, tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    assert cli("run", *LONG) == 0
    want = capsys.readouterr().out
    assert cli("run", "-f", str(path), *LONG[2:]) == 0
    assert capsys.readouterr().out == want


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-p", ""), "the prompt is empty (0 tokens)"),
        (("-p", "x" * 300, "-c", "200"), "300 tokens and the context holds 200"),
        (("-f", "/nowhere/prompt.txt"), "prompt file /nowhere/prompt.txt cannot be read"),
        (("-p", "x", "--temp", "-1"), "temperature (--temp) is -1.0; expected 0 or more"),
        (("-p", "x", "-n", "0"), "max_tokens (-n) is 0"),
        (("-p", "x", "-c", "1"), "context_len (-c) is 1"),
        (("-p", "x", "--device", "tpu"), "device 'tpu' is not on this machine"),
        (("-p", "x", "--dtype", "int8"), "dtype 'int8' is not known"),
        (("-p", "x", "-m", "random:nothing"), "random:nothing"),
        (("-p", "x", "-m", "no/such-model-here-0"), "was not found. Tried:"),
        (("-p", "x", "--prompt-graphs", "always"), "expected one of off, seed, resident"),
    ],
)
def test_bad_input_is_one_clear_error(args, words, cli, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli("run", "-no-cnv", *args) == 1
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err


def test_sampling_flags_reach_the_sampler(cli, capsys):
    args = ("-p", "x", "-no-cnv", "-n", "6", "--ignore-eos", "--temp", "0")
    assert cli("run", *args) == 0
    free = capsys.readouterr().out
    assert cli("run", *args, "--repeat-penalty", "1.5", "--frequency-penalty", "2") == 0
    capsys.readouterr()
    assert cli("run", *args, "-l", "65+1000") == 0
    assert capsys.readouterr().out.strip() == "A" * 6 != free.strip()
    assert cli("run", *args, "-l", "99999+1") == 1
    assert "99999" in capsys.readouterr().err


def test_wrong_usage_exits_2(cli, capsys):
    for args in ((), ("-p", "x", "-f", "y"), ("-p", "x", "--no-such-flag"), ("-p", "x", "-l", "a")):
        with pytest.raises(SystemExit) as exited:
            cli("run", *args)
        assert exited.value.code == 2


def test_a_chat_template_is_used_unless_told_otherwise(cli, capsys):
    assert cli("run", "-p", "x", "-sys", "y", "-n", "1") == 0


def test_help_names_every_command(capsys):
    from graphseed.cli.main import main

    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "run" in out and "demo" in out


def test_a_forward_pass_takes_the_smaller_of_b_and_ub(cli, caplog, capsys):
    assert cli("run", *LONG, "-b", "8", "--prompt-graphs", "seed") == 0
    assert "first=aten.embedding[1, 8, 64]" in caplog.text
    assert cli("run", *LONG, "-b", "0") == 1
    assert "-b is 0; expected at least 1" in capsys.readouterr().err
