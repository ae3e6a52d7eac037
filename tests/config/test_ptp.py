"""PtpConfig: what it accepts, and one line for everything else."""

from __future__ import annotations

import json

import pytest

from tests.support import config_edits
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.ptp.embedding import EMBEDDINGS

TARGET = {
    "model_type": "llama",
    "hidden_size": 8,
    "vocab_size": 5,
    "num_hidden_layers": 2,
    "architectures": ["LlamaForCausalLM"],
}
OPTIONAL = {"u_features", "u_hidden", "late_width", "distribution_trust", "accepted"}


def create(**changes) -> PtpConfig:
    settings = dict(variant="o-ptp", window=4, target=TARGET, verifier="../target")
    return PtpConfig.create(**(settings | changes))


def changed(path: str, value=...) -> dict:
    """A valid config, edited."""
    return config_edits.changed(create().model_dump(exclude_none=True), path, value)


def refusal(values) -> str:
    return config_edits.refusal(PtpConfig, values)


@pytest.mark.parametrize("u_embedding", EMBEDDINGS)
@pytest.mark.parametrize("variant", ["o-ptp", "c-ptp", "late", "independent"])
def test_what_create_makes_is_read_back_equal(tmp_path, u_embedding, variant):
    config = create(
        variant=variant,
        u_embedding=u_embedding,
        lora_rank=3,
        lora_alpha=6,
        trained_temperature=0.7,
        trained_top_k=40,
        trained_top_p=0.9,
        accepted=(0.5, 0.25, 0.125, 0.125),
    )
    (tmp_path / "config.json").write_text(config.to_json())
    assert PtpConfig.read(tmp_path / "config.json") == config


def test_a_config_follows_the_speculators_convention():
    values = json.loads(create(num_speculative_tokens=2).to_json())
    assert values["architectures"] == ["PtpHeadModel"]
    assert values["speculators_model_type"] == values["speculators_config"]["algorithm"] == "ptp"
    assert "model_type" not in values
    assert values["speculators_config"]["default_proposal_method"] == "greedy"
    assert values["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 2}]
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": "../target",
        "architectures": ["LlamaForCausalLM"],
    }


def test_what_a_head_has_not_is_not_written():
    assert not OPTIONAL & json.loads(create().to_json()).keys()
    whole = create(variant="late", u_embedding="arithmetic-mlp", accepted=[1, 0, 0, 0])
    assert (whole.late_width, whole.distribution_trust) == (8, 0.85)  # where none are given
    assert OPTIONAL & json.loads(whole.to_json()).keys() == OPTIONAL


def test_drafts_default_to_the_whole_window_after_the_verifiers_token():
    assert create().num_speculative_tokens == 3
    assert create(num_speculative_tokens=1).num_speculative_tokens == 1


def test_every_field_is_described():
    assert all(field.description for field in PtpConfig.model_fields.values())


@pytest.mark.parametrize("key", sorted(PtpConfig.model_fields.keys() - OPTIONAL))
def test_every_key_is_needed(key):
    text = refusal(changed(key))
    assert repr(key) in text
    assert "missing" in text


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("variant", "mtp", ["variant", "'mtp'", "'o-ptp', 'c-ptp', 'late' or 'independent'"]),
        ("variant", "late", ["late_width=None", "variant late has it", "set it"]),
        ("informed", False, ["unknown key 'informed'"]),
        ("window", 1, ["window", "1", "2"]),
        ("window", 10**9, ["window", "1000000000", "256"]),
        ("window", "4", ["window", "'4'", "integer"]),
        ("u_embedding", "fourier", ["'fourier'", "ieee, scalar"]),
        ("u_features", 32, ["u_features=32", "'ieee'"]),
        ("u_hidden", 0, ["u_hidden", "0", "1"]),
        ("late_width", 0, ["late_width", "0", "1"]),
        ("late_width", 3, ["late_width=3 with variant 'o-ptp'", "remove it"]),
        ("distribution_trust", 0.5, ["distribution_trust=0.5 with variant 'o-ptp'", "remove it"]),
        ("distribution_trust", 0, ["distribution_trust", "0", "greater than 0"]),
        ("distribution_trust", 1.0, ["distribution_trust", "1.0", "less than 1"]),
        ("u_embedding", "threshold-mlp", ["'threshold-mlp'", "needs u_features"]),
        ("lora_rank", 0, ["lora_rank", "0", "1"]),
        ("lora_alpha", 0, ["lora_alpha", "0", "greater than 0"]),
        ("lora_alpha", float("inf"), ["lora_alpha", "inf"]),
        ("vocab_size", 10**18, ["vocab_size", "4194304"]),
        ("hidden_size", -4, ["hidden_size", "-4"]),
        ("format_version", 3, ["format_version", "3", "reads formats 1 and 2"]),
        ("speculators_model_type", "mtpc", ["speculators_model_type", "'mtpc'", "'ptp'"]),
        ("trained_temperature", 0, ["trained_temperature", "0", "greater than 0"]),
        ("trained_top_k", -1, ["trained_top_k", "-1"]),
        ("trained_top_p", 1.5, ["trained_top_p", "1.5"]),
        ("accepted", [0.5, 0.5], ["accepted has 2 entries", "window=4"]),
        ("accepted", [0.5, 0.2, 0.1, 0.1], ["accepted", "sum is 0.9"]),
        ("accepted", [1.5, -0.5, 0, 0], ["accepted", "numbers from 0"]),
        ("accepted", [float("nan"), 1, 0, 0], ["accepted", "numbers from 0"]),
        ("accepted", "none", ["accepted", "'none'", "list"]),
        ("transformer_layer_config", {}, ["num_hidden_layers is missing"]),
        ("transformer_layer_config.num_hidden_layers", 10**9, ["num_hidden_layers", "1000000000", "4096"]),
        ("transformer_layer_config.num_hidden_layers", True, ["num_hidden_layers", "True"]),
        ("speculators_config.algorithm", "mtpc", ["speculators_config.algorithm", "'ptp'"]),
        ("speculators_config.proposal_methods.0.proposal_type", "probabilistic", ["'probabilistic'", "'greedy'"]),
        ("speculators_config.proposal_methods.0.speculative_tokens", 4, ["speculative_tokens=4", "window=4", "3"]),
        ("speculators_config.proposal_methods", [], ["proposal_methods", "[]"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(path, value, words):
    text = refusal(changed(path, value))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "path, allowed",
    [
        ("circuit", "variant"),
        ("speculators_config.windw", "proposal_methods"),
        ("speculators_config.proposal_methods.0.windw", "speculative_tokens"),
    ],
)
def test_an_unknown_key_is_answered_with_the_keys_allowed_in_its_place(path, allowed):
    text = refusal(changed(path, 8))
    assert f"unknown key {path!r}" in text
    assert allowed in text.partition("allowed keys:")[2]


def test_the_two_kinds_of_heads_do_not_read_each_others_configs():
    head = HeadConfig.create(circuit="cp", window=4, num_components=2, target=TARGET, verifier="../target")
    assert "speculators_model_type" in refusal(json.loads(head.to_json()))
    with pytest.raises(HeadConfigError, match="speculators_model_type"):
        HeadConfig.parse(json.loads(create().to_json()))


@pytest.mark.parametrize(
    "values, words", [([], "list"), ("ptp", "str"), (None, "NoneType"), (TARGET, "not a head's config")]
)
def test_what_is_no_heads_config_is_called_so(values, words):
    assert words in refusal(values)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"variant": "mtp"}, ["'mtp'"]),
        ({"window": 1}, ["window"]),
        ({"u_embedding": "fourier"}, ["'fourier'", "ieee"]),
        ({"u_features": 8}, ["u_features=8", "'ieee'"]),
        ({"num_speculative_tokens": 4}, ["speculative_tokens=4", "at most 3"]),
        ({"accepted": [1.0]}, ["accepted has 1 entries"]),
        ({"verifier": ""}, ["name_or_path"]),
        ({"target": {**TARGET, "num_hidden_layers": None}}, ["num_hidden_layers"]),
        ({"target": {**TARGET, "vocab_size": None}}, ["vocab_size"]),
    ],
)
def test_a_head_that_cannot_be_is_refused_when_it_is_created(changes, words):
    with pytest.raises(HeadConfigError) as caught:
        create(**changes)
    assert len(str(caught.value).splitlines()) == 1
    assert all(word in str(caught.value) for word in words), str(caught.value)
