"""`graphseed run --record-plans` and `graphseed replay-plans`: the bytes of a run, again."""

PROMPT = ("-p", "a prompt of fifty bytes or so, in several chunks.", "-no-cnv", "-n", "5")


def test_recorded_plans_run_again_with_equal_bytes(cli, capsys, tmp_path):
    path = tmp_path / "plans.jsonl"
    for policy in ("off", "seed", "resident"):
        args = ("--prompt-graphs", policy, "--record-plans", str(path), "--ignore-eos")
        assert cli("run", *PROMPT, *args) == 0
        capsys.readouterr()
        assert cli("replay-plans", str(path)) == 0
        out = capsys.readouterr().out
        assert "steps: 8, logits differ in 0" in out and "verdict: equal bytes" in out


def test_a_record_whose_bytes_differ_exits_1_and_names_the_steps(cli, capsys, tmp_path):
    path = tmp_path / "plans.jsonl"
    assert cli("run", *PROMPT, "--record-plans", str(path), "--ignore-eos") == 0
    lines = path.read_text().splitlines()
    at = lines[2].index('"output": "') + len('"output": "')
    digit = "0" if lines[2][at] != "0" else "1"
    lines[2] = lines[2][:at] + digit + lines[2][at + 1 :]
    path.write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert cli("replay-plans", str(path)) == 1
    out = capsys.readouterr().out
    assert "first differing steps: 1\n" in out and "the bytes DIFFER" in out


def test_a_file_that_is_no_record_is_named(cli, capsys, tmp_path):
    path = tmp_path / "nothing.jsonl"
    for text in ("", "{}\n", "no json\n"):
        path.write_text(text)
        assert cli("replay-plans", str(path)) == 1
        assert "nothing.jsonl" in capsys.readouterr().err
    assert cli("replay-plans", str(tmp_path / "missing")) == 1
    assert "missing cannot be read" in capsys.readouterr().err


def test_a_record_that_was_cut_off_is_named(cli, capsys, tmp_path):
    path = tmp_path / "plans.jsonl"
    assert cli("run", *PROMPT, "--record-plans", str(path)) == 0
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    assert cli("replay-plans", str(path)) == 1
    assert "has no end" in capsys.readouterr().err


def test_a_record_that_cannot_be_written_is_an_error_before_the_answer(cli, capsys):
    assert cli("run", *PROMPT, "--record-plans", "/proc/nothing/x") == 1
    out = capsys.readouterr()
    assert "--record-plans /proc/nothing/x cannot be written" in out.err and not out.out
