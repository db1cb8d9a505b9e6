"""The flags of `graphseed serve`: read as llama-server reads its own, and what they come to."""

import re
from math import inf

import pytest

from graphseed.capture import Selection
from graphseed.cli.serve.flags import BadUsage, parse
from graphseed.cli.serve.model import ServeModel
from graphseed.cli.serve.settings import (
    device_of,
    engine_config,
    listen_options,
    model_of,
    planned_config,
    server_settings,
)
from graphseed.cli.serve.table import USED, Kind
from graphseed.cli.serve.unused import IGNORED, REFUSED
from graphseed.drivers import open_driver
from graphseed.engine import BadParameter, Pooling
from graphseed.models import load_model
from graphseed.server.ledger import Ledger
from graphseed.server.wire.params import RANDOM_SEED

ASKED = """
--port --temp --seed --host --slots --no-slots --jinja --no-jinja --hf-repo --hf-file --offline
--model --model-url --batch-size --ubatch-size --threads --n-gpu-layers --cont-batching --embedding
--reranking --metrics --kv-unified --swa-full --pooling --alias --tags --ctx-size --parallel -ctk
-ctv -fa --n-predict --slot-save-path --verbose --lora --context-shift --api-key --spec-type
--spec-draft-n-max --no-ui --reasoning-format --reasoning --chat-template --chat-template-file
--mmproj-url --no-mmproj --media-path --sleep-idle-seconds --cache-ram --no-cache-idle-slots
--backend_sampling --grp-attn-n --grp-attn-w --models-dir --models-max --models-preset
--no-models-autoload --cors-origins --tools --tools-runtime --mcp-servers-config --mcp-servers-json
--ui-mcp-proxy --model-draft --spec-synth-len --spec-synth-rates
"""


def args_of(*argv, **environ):
    return parse(argv, environ)


def settings_of(*argv, **environ):
    return server_settings(args_of(*argv, **environ))


# Reading


def test_each_name_stands_for_one_flag():
    names = [name for flag in USED for name in (*flag.names, *flag.off_names)]
    names += [name for other in (*IGNORED, *REFUSED) for name in other.names]
    assert len(names) == len(set(names)) and all(name.startswith("-") for name in names)


def test_every_flag_that_is_used_can_be_given_and_reaches_its_value():
    for flag in USED:
        for name in flag.names:
            argv = {Kind.SWITCH: [], Kind.WHOLE: ["7"], Kind.NUMBER: ["0.5"]}.get(flag.kind, ["x"])
            value = getattr(args_of(name, *argv), flag.key)
            expected = {Kind.SWITCH: True, Kind.WHOLE: 7, Kind.NUMBER: 0.5, Kind.LIST: ["x"]}
            assert value == expected.get(flag.kind, "x"), name
        for name in flag.off_names:
            assert getattr(args_of(name), flag.key) is False


def test_every_flag_of_the_servers_own_tests_is_known():
    known = {name for flag in USED for name in (*flag.names, *flag.off_names)}
    known |= {name for other in (*IGNORED, *REFUSED) for name in other.names}
    assert set(ASKED.split()) <= known


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--no-such-flag"], "invalid argument: --no-such-flag"),
        (["-m", "x", "stray"], "invalid argument: stray"),
        (["-noflag"], "invalid argument: -noflag"),
        (["--port=1"], "invalid argument: --port=1"),
        (["--port"], "--port needs a value"),
        (["--port", "x"], "--port is 'x'; expected a whole number"),
        (["--temp", "warm"], "--temp is 'warm'; expected a number"),
        (["--temp", "nan"], "--temp is 'nan'; expected a number"),
        (["--lora", "x.gguf"], "--lora cannot be honoured: adapters are not applied"),
    ],
)
def test_what_is_not_understood_is_an_error_in_llama_servers_words(argv, words):
    with pytest.raises(BadUsage, match=re.escape(words)):
        parse(argv, {})


def test_a_flag_that_means_nothing_here_is_accepted_and_says_why():
    args = args_of("-fa", "on", "-ctk", "f16", "--swa-full", "--port", "1", LLAMA_ARG_FIT="off")
    assert args.port == 1
    assert [note.split(" means nothing here: ")[0] for note in args.notes] == [
        "LLAMA_ARG_FIT", "-fa", "-ctk", "--swa-full",
    ]  # fmt: skip
    assert all(note.split(": ", 1)[1] for note in args.notes)


def test_a_value_may_look_like_a_flag():
    assert args_of("-n", "-1").predict == -1
    assert args_of("--chat-template", "-m").chat_template == "-m"


def test_a_flag_beats_its_variable():
    environ = {"LLAMA_ARG_PORT": "1", "LLAMA_API_KEY": "a,b", "LLAMA_ARG_TEMPERATURE": "0.5"}
    assert parse([], environ).port == 1 and parse(["--port", "2"], environ).port == 2
    assert server_settings(parse([], environ)).api_keys == ("a", "b")
    both = parse(["--api-key", "c", "--api-key", "d"], environ)
    assert server_settings(both).api_keys == ("c", "d")
    assert parse([], environ).temperature == 0.5
    with pytest.raises(BadUsage, match="LLAMA_ARG_PORT is 'x'; expected a whole number"):
        parse([], {"LLAMA_ARG_PORT": "x"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("1", True), ("on", True), ("enabled", True), ("false", False),
        ("0", False), ("off", False), ("disabled", False),
    ],
)  # fmt: skip
def test_a_switch_is_read_from_its_variable_as_llama_server_does(text, value):
    assert args_of(LLAMA_ARG_ENDPOINT_METRICS=text).has_metrics is value
    assert args_of(LLAMA_ARG_ENDPOINT_SLOTS=text).has_slots is value
    assert args_of("--no-slots", LLAMA_ARG_ENDPOINT_SLOTS=text).has_slots is False


def test_a_switch_has_a_variable_that_turns_it_off_and_no_other_words():
    assert args_of(LLAMA_ARG_NO_ENDPOINT_SLOTS="anything").has_slots is False
    with pytest.raises(BadUsage, match="LLAMA_ARG_UI is 'yes'; expected one of"):
        args_of(LLAMA_ARG_UI="yes")


def test_googles_prediction_service_chooses_the_port():
    environ = {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "7080"}
    assert parse(["--port", "1"], environ).port == 7080
    assert parse(["--port", "1"], {"AIP_HTTP_PORT": "7080"}).port == 1


# What flags come to


def test_defaults_are_llama_servers():
    settings = settings_of()
    own = settings.defaults
    assert (own.temperature, own.top_k, own.top_p, own.min_p) == (0.8, 40, 0.95, 0.05)
    assert own.seed == RANDOM_SEED and own.max_tokens == -1 and settings.num_predict == -1
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert settings.has_slots and not settings.has_metrics and not settings.has_props
    assert settings.timeout_seconds == 3600 and settings.sse_ping_seconds == 30


def test_sampling_flags_are_the_defaults_of_requests():
    own = settings_of(
        "--temp", "-1", "--top-k", "-5", "--top-p", "2", "-s", "42", "-n", "64", "-l", "7-inf",
        "-r", "END", "--ignore-eos", "--repeat-penalty", "1.1",
    ).defaults  # fmt: skip
    assert own.is_greedy and own.top_k == 0 and own.top_p == 1.0 and own.seed == 42
    assert own.max_tokens == 64 and own.logit_bias == ((7, -inf),) and own.stop == ("END",)
    assert own.ignore_eos and own.repeat_penalty == 1.1


def test_keys_come_from_a_file_too(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# a comment\nfirst\n\nsecond \n", encoding="utf-8")
    assert settings_of("--api-key-file", str(path)).api_keys == ("first", "second")
    path.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(BadParameter, match="a file with a key in it"):
        settings_of("--api-key-file", str(path))


def test_tools_limit_origins_to_this_machine_unless_they_are_named():
    assert settings_of().cors_origins == ()
    assert settings_of("--tools", "all").cors_origins == ("localhost",)
    named = settings_of("--tools", "all", "--cors-origins", "https://a, https://b")
    assert named.cors_origins == ("https://a", "https://b")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sleep-idle-seconds", "0"], "--sleep-idle-seconds is 0; expected -1 (never)"),
        (["--sleep-idle-seconds", "5", "--record-plans", "f"], "--record-plans is 'f'"),
        (["--slot-save-path", "/tmp", "--record-plans", "f"], "--record-plans is 'f'"),
        (["--max-body-bytes", "0"], "--max-body-bytes is 0"),
        (["--api-prefix", "x"], "--api-prefix is 'x'; expected /PATH"),
        (["--pooling", "rank"], "--pooling is 'rank'; expected one of mean, cls, last, none"),
        (["--port", "70000"], "port (--port) is 70000"),
        (["--chat-template-file", "/no/such"], "--chat-template-file is '/no/such'"),
        (["--chat-template", "{{ x"], "--chat-template is '{{ x'; expected Jinja"),
        (["--api-key", "a,,b"], "--api-key is 'an empty key'"),
        (["-l", "x"], "--logit-bias is ['x']"),
        (["--slot-save-path", "/dev/null/x"], "--slot-save-path is '/dev/null/x'"),
    ],
)
def test_a_bad_value_names_the_flag_the_value_and_what_was_expected(argv, words):
    with pytest.raises(BadParameter, match=re.escape(words)):
        settings_of(*argv)


def test_the_context_is_what_all_slots_have_together():
    sizes = {
        ("-c", "512", "-np", "2"): (256, 2, 0),
        ("-c", "512", "-np", "2", "-kvu"): (512, 2, 512),
        ("-c", "512"): (512, 4, 512),  # -np -1
        ("-c", "512", "--no-kv-unified"): (128, 4, 0),
        ("-np", "3"): (0, 3, 0),
    }
    for argv, expected in sizes.items():
        config = planned_config(args_of(*argv))
        assert (config.context_len, config.num_parallel, config.kv_len) == expected
    assert planned_config(args_of("-b", "32")).num_ubatch == 32
    assert planned_config(args_of("--embeddings")).embeds
    assert not planned_config(args_of("--no-cache-prompt")).reuses_prefixes


@pytest.mark.parametrize(
    "argv", [("-np", "0"), ("-np", "-2"), ("-c", "-1"), ("-c", "4", "-np", "4"), ("-b", "0")]
)
def test_sizes_that_cannot_be_are_refused(argv):
    with pytest.raises(BadParameter, match=argv[0]):
        planned_config(args_of(*argv))


def test_without_a_context_the_slots_share_the_models():
    model = load_model(
        "random:tiny-llama", device="cpu", dtype="fp32", bf16_is_fast=False, progress=False
    )
    driver = open_driver("cpu")
    for argv, expected in (
        (("-np", "2"), (model.context_len // 2, 0)),
        ((), (model.context_len, model.context_len)),
    ):
        config = engine_config(args_of(*argv), model, driver)
        assert (config.context_len, config.kv_len) == expected


@pytest.mark.parametrize(
    ("argv", "device"),
    [
        ((), "auto"), (("-ngl", "0"), "cpu"), (("-ngl", "99"), "auto"), (("-ngl", "all"), "auto"),
        (("-dev", "none"), "cpu"), (("-dev", "CUDA1"), "cuda:1"), (("-mg", "2"), "cuda:2"),
        (("--device", "cuda:3"), "cuda:3"), (("-dev", "cuda", "-ngl", "0"), "cuda"),
    ],
)  # fmt: skip
def test_a_device_is_named_in_llama_cpps_way_or_in_ours(argv, device):
    assert device_of(args_of(*argv)) == device


def test_a_model_is_named_by_m_or_by_its_repository():
    assert model_of(args_of()) == "smollm2"
    assert model_of(args_of("-hf", "owner/name:Q8_0")) == "owner/name"
    assert model_of(args_of("-hf", "owner/name", "-m", "x.gguf")) == "x.gguf"
    assert model_of(args_of("-hf", "owner/name", "-hff", "a.gguf")) == "owner/name/a.gguf"
    with pytest.raises(BadParameter, match="--hf-repo with it"):
        model_of(args_of("-hff", "a.gguf"))
    for argv in (("-dev", "CUDA0,CUDA1"), ("-ngl", "some")):
        with pytest.raises(BadParameter):
            device_of(args_of(*argv))


def test_a_file_of_a_repository_is_fetched_from_the_hub(monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(repo, file, *, local_files_only):
        asked.append((repo, file, local_files_only))
        raise OSError("no network\nand a long story")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    args = args_of("-hf", "owner/name:Q8_0", "-hff", "a.gguf", "--offline", "--device", "cpu")
    with pytest.raises(BadParameter, match=re.escape("a file of owner/name (no network)")):
        ServeModel(args, Selection(), Ledger()).load()
    assert asked == [("owner/name", "a.gguf", True)]


def test_tls_needs_both_files(tmp_path):
    with pytest.raises(BadParameter, match="both --ssl-key-file and --ssl-cert-file"):
        listen_options(args_of("--ssl-key-file", "k"))
    with pytest.raises(BadParameter, match="--ssl-key-file is 'k'; expected a file"):
        listen_options(args_of("--ssl-key-file", "k", "--ssl-cert-file", "c"))
    with pytest.raises(BadParameter, match="--drain-seconds"):
        listen_options(args_of("--drain-seconds", "-1"))


def test_embeddings_pool_as_they_are_told():
    settings = settings_of("--embeddings", "--pooling", "last")
    assert settings.embeds and settings.pooling is Pooling.LAST
