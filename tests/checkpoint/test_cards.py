"""The metadata of a head's card."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from benchmarks.demo import demo_heads
from tests.support.files import front_matter_of
from vllm_mtpc.checkpoint.metadata import card_data, eval_results, target_license, weights_of


def test_known_metadata_is_read_back(tmp_path: Path) -> None:
    scores = eval_results({"T=1": 2.8811, "T=0": 3.9}, ["org/text"])
    license = {"license": "other", "license_name": "llama3", "license_link": "LICENSE"}
    data = card_data(["mtpc", "a"], "org/model", license, scores, "A head: n=8")
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n# A head\n")
    assert card.data.to_dict() == data.to_dict() and card.text.strip() == "# A head"
    one, zero = card.data.eval_results
    assert (one.metric_type, one.metric_name, one.metric_value) == ("tokens_per_step", "Tokens/step at T=1", 2.881)
    assert (zero.metric_name, zero.metric_value, zero.dataset_type) == ("Tokens/step at T=0", 3.9, "org/text")
    (tmp_path / "README.md").write_text(str(card))
    assert target_license(str(tmp_path)) == license


def test_unknown_metadata_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{card_data(['a'], None).to_yaml()}\n---\n# A head\n")
    assert front_matter_of(tmp_path) == {"library_name": "vllm", "pipeline_tag": "text-generation", "tags": ["a"]}


@pytest.mark.parametrize(
    ("given", "said"),
    [("base_model: a/b\nbase_model_relation: quantized", "a/b, quantized"), ("base_model: a/b", "a/b"),
     ("base_model: [a/b, c/d]", ""), ("license: mit", "")],
)  # fmt: skip
def test_card_names_the_weights_that_were_trained_on(tmp_path: Path, given: str, said: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{given}\n---\n")
    assert weights_of(str(tmp_path)) == said
    assert weights_of("org/name") == ""


@pytest.mark.parametrize(
    "text", ["", "# A head\n", "---\nlicense: unknown\n---\n", "---\na: [\n---\n", "---\n- a\n---\n"]
)
def test_card_without_licence(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert target_license(str(tmp_path)) == {}
    assert target_license(str(tmp_path / "none")) == {}


def test_local_file_is_not_a_hub_data_set() -> None:
    local, several = (eval_results({"T=1": 2.0}, names)[0] for names in (["held.jsonl"], ["a/b", "c"]))
    assert (local.dataset_type, local.dataset_name) == ("text", "held.jsonl")
    assert (several.dataset_type, several.dataset_name) == ("text", "a/b, c")


@pytest.mark.parametrize("name", ["target", *demo_heads.NAMES])
def test_packaged_cards(name: str) -> None:
    found = front_matter_of(demo_heads.path(name))
    assert (found["license"], found["pipeline_tag"]) == ("apache-2.0", "text-generation")
    assert name == "target" or "model-index" in found
