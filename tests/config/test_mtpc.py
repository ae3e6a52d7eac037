"""HeadConfig: what it accepts, and one line for everything else."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from tests.support import config_edits
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import CheckpointError, HeadConfigError, MtpcError, ServeConfigError, one_line
from vllm_mtpc.heads import head_options

TARGET = {"model_type": "llama", "hidden_size": 8, "vocab_size": 5, "architectures": ["LlamaForCausalLM"]}


def create(**changes) -> HeadConfig:
    settings = dict(circuit="btree", window=5, num_components=2, target=TARGET, verifier="../target")
    return HeadConfig.create(**(settings | changes))


def changed(path: str, value=...) -> dict:
    """A valid config, edited."""
    return config_edits.changed(create().model_dump(), path, value)


def refusal(values) -> str:
    return config_edits.refusal(HeadConfig, values)


def test_what_create_makes_is_read_back_equal(tmp_path):
    config = create(trained_temperature=0.7, trained_top_k=40, trained_top_p=0.9)
    (tmp_path / "config.json").write_text(config.to_json())
    assert HeadConfig.read(tmp_path / "config.json") == config


def test_a_config_follows_the_speculators_convention():
    values = json.loads(create(num_speculative_tokens=3).to_json())
    assert values["speculators_model_type"] == "mtpc"
    assert "model_type" not in values
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": "../target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert values["transformer_layer_config"] == {"model_type": "llama", "hidden_size": 8, "vocab_size": 5}


def test_drafts_default_to_the_whole_window_after_the_verifiers_token():
    assert create().num_speculative_tokens == 4
    assert create(num_speculative_tokens=1).num_speculative_tokens == 1


@pytest.mark.parametrize(
    "head, options",
    [
        ("linear", {}),
        ("shared", {"expander_rank": 64}),
        ("mlp", {"expander_layers": 1}),
        ("transformer", {"expander_layers": 1, "expander_heads": 8}),
    ],
)
def test_a_head_has_its_options_and_no_others(head, options):
    """What a head does not have is not written either: a linear head's file is what it was before there were others."""
    values = json.loads(create(head=head).to_json())
    assert {key: values[key] for key in values if key in head_options()} == options
    assert HeadConfig.parse(values) == create(head=head)
    named = {key: value * 2 if key != "expander_heads" else 2 for key, value in options.items()}
    assert {key: getattr(create(head=head, **named), key) for key in options} == named


def test_the_default_number_of_attention_heads_divides_the_hidden_size():
    assert create(head="transformer", target={**TARGET, "hidden_size": 12}).expander_heads == 4


def test_every_field_is_described():
    assert all(field.description for field in HeadConfig.model_fields.values())


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("circuit", "spn", ["'spn'", "ff, cp, hmm, btree"]),
        ("head", "lstm", ["'lstm'", "linear, shared, mlp, transformer, backbone"]),
        ("head", "shared", ["'shared'", "needs expander_rank", "expander_rank=64"]),
        ("expander_rank", 4, ["expander_rank=4", "'linear'", "remove expander_rank"]),
        ("expander_rank", 0, ["expander_rank", "0", "1"]),
        ("expander_layers", 10**9, ["expander_layers", "1000000000", "64"]),
        ("expander_heads", "2", ["expander_heads", "'2'", "integer"]),
        ("window", 1, ["window", "1", "2"]),
        ("window", 10**9, ["window", "1000000000", "256"]),
        ("window", "5", ["window", "'5'", "integer"]),
        ("window", 5.0, ["window", "5.0", "integer"]),
        ("window", True, ["window", "True", "integer"]),
        ("num_components", 0, ["num_components", "0", "1"]),
        ("num_components", 10**9, ["num_components", "1000000000", "4096"]),
        ("vocab_size", 0, ["vocab_size", "0", "1"]),
        ("vocab_size", 10**18, ["vocab_size", str(10**18), "4194304"]),
        ("hidden_size", -4, ["hidden_size", "-4", "1"]),
        ("hidden_size", 10**18, ["hidden_size", str(10**18), "131072"]),
        ("format_version", 3, ["format_version", "3", "reads formats 1 and 2"]),
        ("format_version", None, ["format_version", "None", "integer"]),
        ("speculators_model_type", "eagle3", ["speculators_model_type", "'eagle3'", "'mtpc'"]),
        ("hidden_state_layer", -2, ["hidden_state_layer", "-2", "-1"]),
        ("lora_layers", 3, ["lora_layers", "3", "0, 1, 2 or 4"]),
        ("draft_sample_method", "tree", ["draft_sample_method", "'tree'", "'probabilistic' or 'greedy'"]),
        ("speculators_config.algorithm", "ptp", ["algorithm = 'ptp'", "'mtpc'"]),
        ("speculators_config.verifier.name_or_path", "a\0b", ["name_or_path", "printable characters"]),
        ("speculators_config.verifier.name_or_path", "a" * 5000, ["name_or_path", "1024"]),
        ("transformer_layer_config.num_hidden_layers", "eight", ["num_hidden_layers = 'eight'", "4096"]),
        ("transformer_layer_config.num_hidden_layers", 10**9, ["num_hidden_layers = 1000000000", "4096"]),
        ("transformer_layer_config.hidden_size", -1, ["hidden_size = -1", "1 to"]),
        ("transformer_layer_config.model_type", ["llama"], ["model_type = ['llama']", "a name"]),
        ("transformer_layer_config.auto_map", {}, ["unknown 'auto_map'", "num_hidden_layers"]),
        ("x1_from", "draft", ["x1_from", "'draft'", "'verifier'"]),
        ("architectures", "MtpcHeadModel", ["architectures", "'MtpcHeadModel'", "list"]),
        ("trained_temperature", 0, ["trained_temperature", "0", "greater than 0"]),
        ("trained_temperature", float("inf"), ["trained_temperature", "inf", "finite"]),
        ("trained_temperature", float("nan"), ["trained_temperature", "nan"]),
        ("trained_top_k", -1, ["trained_top_k", "-1", "0"]),
        ("trained_top_p", 1.5, ["trained_top_p", "1.5", "1"]),
        ("trained_top_p", float("nan"), ["trained_top_p", "nan"]),
        ("speculators_config", [], ["speculators_config", "[]"]),
        ("speculators_config.algorithm", "eagle3", ["speculators_config.algorithm", "'eagle3'", "'mtpc'"]),
        ("speculators_config.proposal_methods", [], ["speculators_config.proposal_methods", "[]", "1"]),
        ("speculators_config.verifier.name_or_path", "", ["speculators_config.verifier.name_or_path", "1"]),
        ("speculators_config.proposal_methods.0.proposal_type", "tree", ["'tree'", "'greedy'"]),
        ("speculators_config.proposal_methods.0.speculative_tokens", 0, ["speculative_tokens", "0", "1"]),
        ("speculators_config.proposal_methods.0.speculative_tokens", 5, ["speculative_tokens=5", "window=5", "4"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(path, value, words):
    text = refusal(changed(path, value))
    assert all(word in text for word in words), text


def test_a_fully_factorised_head_has_one_component():
    assert "num_components=2" in refusal(changed("circuit", "ff"))


@pytest.mark.parametrize(
    "path, allowed, elsewhere",
    [
        ("windw", "window", "speculative_tokens"),
        ("speculators_config.windw", "proposal_methods", "num_components"),
        ("speculators_config.verifier.windw", "name_or_path", "num_components"),
        ("speculators_config.proposal_methods.0.windw", "speculative_tokens", "num_components"),
    ],
)
def test_an_unknown_key_is_answered_with_the_keys_allowed_in_its_place(path, allowed, elsewhere):
    text = refusal(changed(path, 8))
    assert f"unknown key {path!r}" in text
    assert allowed in text.partition("allowed keys:")[2]
    assert elsewhere not in text.partition("allowed keys:")[2]


@pytest.mark.parametrize("key", sorted(HeadConfig.model_fields.keys() - head_options()))
def test_every_key_is_needed(key):
    text = refusal(changed(key))
    assert repr(key) in text
    assert "missing" in text


@pytest.mark.parametrize(
    "path", ["speculators_config.verifier.name_or_path", "speculators_config.proposal_methods.0.speculative_tokens"]
)
def test_nested_keys_are_needed_too(path):
    assert f"{path!r} is missing" in refusal(changed(path))


def test_the_config_of_a_target_is_called_what_it_is():
    text = refusal(TARGET)
    assert "not a head's config" in text
    assert "speculators_model_type" in text


@pytest.mark.parametrize("values", [[], "mtpc", 3, None])
def test_a_config_is_an_object(values):
    assert type(values).__name__ in refusal(values)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe{}",
        b'{"window": ' + b"9" * 5000 + b"}",  # more digits than Python converts
        b"[" * 100_000,
        b"[]",
        b"null",
    ],
    ids=["empty", "half", "words", "not-utf8", "digits", "deep", "list", "null"],
)
def test_a_file_that_is_not_a_json_object_is_refused(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        HeadConfig.read(file)
    assert len(str(caught.value).splitlines()) == 1
    assert str(file) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        HeadConfig.read(tmp_path / "config.json")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"circuit": "spn"}, ["'spn'", "btree"]),
        ({"window": 1}, ["window=1"]),
        ({"window": 10**12}, ["window=1000000000000", "256"]),
        ({"num_components": 0}, ["num_components=0"]),
        ({"head": "lstm"}, ["'lstm'", "linear"]),
        ({"expander_rank": 4}, ["expander_rank=4", "'linear'"]),
        ({"head": "mlp", "expander_heads": 2}, ["expander_heads=2", "'mlp'", "expander_layers"]),
        ({"head": "transformer", "expander_heads": 3}, ["expander_heads=3", "hidden_size=8", "expander_heads to"]),
        ({"lora_layers": 3}, ["lora_layers", "3"]),
        ({"num_speculative_tokens": 5}, ["speculative_tokens=5", "at most 4"]),
        ({"num_speculative_tokens": 0}, ["speculative_tokens", "0", "1"]),
        ({"verifier": ""}, ["name_or_path"]),
        ({"target": {"hidden_size": 8}}, ["vocab_size"]),
        ({"target": {"vocab_size": 8}}, ["hidden_size"]),
    ],
)
def test_a_head_that_cannot_be_is_refused_when_it_is_created(changes, words):
    with pytest.raises(HeadConfigError) as caught:
        create(**changes)
    assert len(str(caught.value).splitlines()) == 1
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kind", [MtpcError, HeadConfigError, ServeConfigError])
def test_an_error_is_one_line_and_a_value_error(kind):
    """Names and causes come from files: a line break in one must not break the line."""
    error = kind("tensor 'a\nb' is\r\nunknown")
    assert isinstance(error, ValueError)
    assert str(error) == "tensor 'a b' is unknown"


def test_unknown_keys_can_be_answered_with_a_list_of_keys():
    with pytest.raises(ValidationError) as caught:
        HeadConfig.model_validate(changed("windw", 8))
    text = one_line(caught.value, ["method", "draft"])
    assert text == "unknown key 'windw'; allowed keys: draft, method; remove it or correct its name"
