"""What the measuring commands have in common."""

import pytest

from graphseed.cli.main import main


@pytest.mark.parametrize("command", ["demo", "bench", "bench --load", "verify", "attribute"])
def test_I12_a_command_that_measures_graphs_refuses_to_run_while_they_are_off(
    command, capsys, monkeypatch
):
    monkeypatch.setenv("GGML_CUDA_DISABLE_GRAPHS", "0")  # any value
    assert main([*command.split(), "-m", "random:tiny-llama", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert "GGML_CUDA_DISABLE_GRAPHS is set" in error and "unset it" in error
