"""I10 and I12: what the selectors mean, and what defeats them."""

import pytest

from graphseed.capture import Policy, SelectorError, read_selectors

SEED = "GGML_CUDA_PROMPT_GRAPH_CAPTURE_SEED"
DISABLE = "GGML_CUDA_DISABLE_GRAPHS"


@pytest.mark.parametrize(
    ("environ", "flag", "prompt", "source"),
    [
        ({}, None, Policy.OFF, "default"),
        ({SEED: "0"}, None, Policy.OFF, f"{SEED}=0"),
        ({SEED: "1"}, None, Policy.SEED, f"{SEED}=1"),
        ({}, "resident", Policy.RESIDENT, "--prompt-graphs resident"),
        ({SEED: "1"}, "off", Policy.OFF, "--prompt-graphs off"),
        ({SEED: "1"}, "seed", Policy.SEED, "--prompt-graphs seed"),
    ],
)
def test_I12_the_policy_and_its_source(environ, flag, prompt, source):
    selection = read_selectors(environ, flag)
    assert (selection.prompt, selection.source) == (prompt, source)
    assert selection.decode is Policy.SEED


@pytest.mark.parametrize("value", ["yes", "2x", "", "true", "01", " 1"])
def test_a_value_that_means_nothing_is_an_error_that_names_it(value):
    with pytest.raises(SelectorError, match=f"{SEED}={value!r} means nothing"):
        read_selectors({SEED: value})


def test_a_flag_that_means_nothing_is_an_error():
    with pytest.raises(SelectorError, match="'always' means nothing; expected one of off, seed"):
        read_selectors({}, "always")


def test_a_disagreement_is_won_by_the_flag_and_names_both():
    [warning] = read_selectors({SEED: "1"}, "resident").warnings
    assert f"{SEED}=1" in warning and "--prompt-graphs for resident" in warning


def test_agreement_warns_of_nothing():
    assert read_selectors({SEED: "1"}, "seed").warnings == ()


@pytest.mark.parametrize("value", ["1", "0", "", "no"])
def test_I12_disable_turns_every_graph_off_whatever_its_value(value):
    selection = read_selectors({SEED: "1", DISABLE: value})
    assert selection.are_graphs_disabled
    assert selection.source == DISABLE
    [warning] = selection.warnings
    assert "has no effect" in warning and DISABLE in warning


def test_I12_disable_without_a_selector_warns_of_nothing():
    assert read_selectors({DISABLE: "1"}).warnings == ()


def test_I10_an_allocator_that_defeats_capture_is_named():
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", SEED: "1"}
    [warning] = read_selectors(environ).warnings
    assert "PYTORCH_CUDA_ALLOC_CONF" in warning and "cudaMallocAsync" in warning


def test_the_registry_holds_every_selector_that_was_read():
    read = dict(read_selectors({SEED: "1"}, "seed").read)
    assert read == {"--prompt-graphs": "seed", SEED: "1", DISABLE: None}
