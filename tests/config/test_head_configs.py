"""HeadConfig and PtpConfig follow the schema of `speculators` and are read back; every key is explicit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.config.base import SPECULATORS_VERSION, AnyHeadConfig
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.leaves import LEAVES
from vllm_mtpc.heads.trunk import TRUNKS

TARGET: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "vocab_size": 5, "num_hidden_layers": 2}
TARGET |= {"architectures": ["LlamaForCausalLM"], "num_attention_heads": [2, 4]}
PTP_OPTIONS = {"late_width", "distribution_trust", "accepted"}
KINDS = ("mtpc", "ptp")


def create(kind: str = "mtpc", **changes: Any) -> AnyHeadConfig:
    """A config of window 5."""
    settings = {"window": 5, "target": TARGET, "verifier": "../target"}
    if kind == "ptp":
        return PtpConfig.create(**(settings | {"variant": "o-ptp"} | changes))
    return HeadConfig.create(**(settings | {"circuit": "btree", "num_components": 2} | changes))


PTP_CONFIGS = [
    ("ptp", {"variant": variant, "u_features": 3, "lora_rank": 3, "lora_alpha": 6, "accepted": (0.5, 0.5, 0, 0, 0)})
    for variant in ("o-ptp", "c-ptp", "late", "independent")
]


@pytest.mark.parametrize("kind, settings", [("mtpc", {}), *PTP_CONFIGS])
def test_created_config_is_read_back_equal(tmp_path, kind, settings):
    config = create(kind, trained_temperature=0.7, trained_top_k=40, trained_top_p=0.9, **settings)
    (tmp_path / "config.json").write_text(config.to_json())
    assert read_config(tmp_path) == config


@pytest.mark.parametrize("kind", KINDS)
def test_config_follows_the_schema_of_speculators(kind):
    """`tests/test_habits.py` reads one with the library, where it is installed."""
    values = json.loads(create(kind, num_speculative_tokens=3).to_json())
    assert values["speculators_version"] == SPECULATORS_VERSION
    assert values["speculators_model_type"] == values["speculators_config"]["algorithm"] == kind
    assert values["architectures"] == [{"mtpc": "MtpcHeadModel", "ptp": "PtpHeadModel"}[kind]]
    assert "model_type" not in values
    section = values["speculators_config"]
    assert section["default_proposal_method"] == "greedy"
    assert section["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert section["verifier"] == {"name_or_path": "../target", "architectures": ["LlamaForCausalLM"]}
    kept = TARGET.keys() - {"architectures", "num_attention_heads"}  # not a single size: left out
    assert values["transformer_layer_config"] == {key: TARGET[key] for key in kept}
    assert create(kind).num_speculative_tokens == 4  # the window without x_1
    assert all(field.description for field in type(create(kind)).model_fields.values())


@pytest.mark.parametrize("trunk", TRUNKS.places)
@pytest.mark.parametrize("leaves", LEAVES.places)
@pytest.mark.parametrize("columns", [None, 3])
def test_sections_are_written_whole_and_read_back(trunk, leaves, columns):
    given = {"trunk": {"kind": trunk}, "leaves": {"kind": leaves, "token_rank": 2}, "draft_vocab_size": columns}
    made = create(target=TARGET | {"num_attention_heads": 2, "intermediate_size": 12}, **given)
    values = json.loads(made.to_json())
    for part, table, kind in (("trunk", TRUNKS, trunk), ("leaves", LEAVES, leaves)):
        fields = table.find(kind).Options.model_fields
        assert values[part].keys() | {"model"} == fields.keys() | {"model"} and values[part]["kind"] == kind
        assert all(field.description for field in fields.values())
    assert (values["leaves"]["token_rank"], values.get("draft_vocab_size")) == (2, columns)
    assert HeadConfig.parse(values) == made


@pytest.mark.parametrize("vocab_size, trunk, leaves, rank", [(2000, "none", "own", None), (2001, "mlp", "lm_head", 16)])
def test_default_parts_fit_the_vocabulary(vocab_size, trunk, leaves, rank):
    made = create(target=TARGET | {"vocab_size": vocab_size})
    assert (made.trunk.kind, made.leaves.kind, getattr(made.leaves, "component_rank", None)) == (trunk, leaves, rank)


def test_defaults_depend_on_the_target_and_the_variant():
    assert not PTP_OPTIONS & json.loads(create("ptp").to_json()).keys()
    late = create("ptp", variant="late", accepted=[1, 0, 0, 0, 0])
    assert (late.late_width, late.distribution_trust) == (8, 0.85)
    assert PTP_OPTIONS & json.loads(late.to_json()).keys() == PTP_OPTIONS


@pytest.mark.parametrize(
    "kind, changes, words",
    [
        ("mtpc", {"window": 1}, "'window' = 1"),
        ("mtpc", {"target": {"hidden_size": 8}}, "vocab_size"),
        ("mtpc", {"target": {"vocab_size": 8}}, "hidden_size"),
        ("ptp", {"target": {**TARGET, "num_hidden_layers": None}}, "num_hidden_layers"),
    ],
)
def test_impossible_head_is_not_created(kind, changes, words):
    with pytest.raises(HeadConfigError, match=rf"\A[^\n]*{words}[^\n]*\Z"):
        create(kind, **changes)
