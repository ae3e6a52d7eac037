"""What is put side by side, under which names, and what cannot be run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_mtpc import demo
from vllm_mtpc.bench import decodings
from vllm_mtpc.bench.decodings import INTERPRETED, OWN, V2_INTERPRETED, heads, peers, plain
from vllm_mtpc.errors import CheckpointError, UsageError

NAMES = [str(demo.path(name)) for name in (*demo.CIRCUITS, *demo.PTP)]


def test_heads_are_named_by_circuit_and_ptp_is_apart_without_a_gpu() -> None:
    found, missing = heads(NAMES, {}, None, on_gpu=False)
    assert [one.name for one in found] == ["ff (Medusa-style)", "cp", "hmm", "btree", "o-ptp", "c-ptp", "late"]
    assert [one.group for one in found] == [OWN] * 4 + [V2_INTERPRETED] * 3 and not missing
    assert [one.circuit for one in found] == ["ff", "cp", "hmm", "btree", None, None, None]
    assert all(one.is_ours and not one.is_plain for one in found) and plain().is_plain
    assert found[3].speculative == {"method": "mtpc", "model": NAMES[3]} and found[4].speculative["method"] == "ptp"
    assert found[4].environment == INTERPRETED and found[0].environment == {}


def test_draft_layers_are_apart_without_a_gpu(tmp_path: Path) -> None:
    config = json.loads((demo.path("btree") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "lora_layers": 2}))
    assert [one.group for one in heads([str(tmp_path)], {}, None, on_gpu=False)[0]] == [V2_INTERPRETED]
    assert [one.group for one in heads([str(tmp_path)], {}, None, on_gpu=True)[0]] == [OWN]


def test_on_a_gpu_all_are_on_one_runner() -> None:
    found, _ = heads(NAMES, {}, 3, on_gpu=True)
    assert {one.group for one in found} == {OWN}
    assert all(one.speculative["num_speculative_tokens"] == 3 for one in found)


def test_without_the_interpreter_ptp_is_a_row_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(decodings, "INTERPRETER", tmp_path / "none")
    found, missing = heads(NAMES[-1:], {}, None, on_gpu=False)
    assert not found and missing[0].name == "late" and "need a GPU" in missing[0].reason


def test_variants_are_rows_of_their_own() -> None:
    found, _ = heads(NAMES[3:4], {"K=3": {"num_speculative_tokens": 3}}, None, on_gpu=False)
    assert [one.name for one in found] == ["btree", "btree, K=3"]
    assert found[1].speculative == {"method": "mtpc", "model": NAMES[3], "num_speculative_tokens": 3}


def test_heads_of_one_circuit_are_named_by_folder(tmp_path: Path) -> None:
    names = [tmp_path / place for place in ("a/head", "b/head", "b/mine")]
    for name in names:
        name.mkdir(parents=True)
        (name / "config.json").write_bytes((demo.path("ff") / "config.json").read_bytes())
    kind = " [ff (Medusa-style)]"
    assert [one.name for one in heads(list(map(str, names[1:])), {}, None, False)[0]] == [f"head{kind}", f"mine{kind}"]
    found = [one.name for one in heads(list(map(str, names)), {}, None, False)[0]]
    assert found == [f"{name}{kind}" for name in ("a/head", "b/head", "b/mine")]


def test_a_head_named_twice_is_refused_and_a_missing_one_too() -> None:
    with pytest.raises(UsageError, match="named twice"):
        heads([NAMES[0], NAMES[0]], {}, None, on_gpu=False)
    with pytest.raises(CheckpointError, match="no head"):
        heads(["/no/such/head"], {}, None, on_gpu=False)


class Fake:
    """A target of so many MTP layers, for which vLLM takes everything but one method."""

    def __init__(self, layers: int = 0) -> None:
        self.layers = layers

    def mtp_layers(self) -> int:
        return self.layers

    def problem(self, speculative: dict[str, Any]) -> str | None:
        return "no such method" if speculative.get("method") == "eagel" else None


def test_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found, missing = peers(["ngram", "suffix", "mtp"], [("one", {"model": "an/eagle"})], None, Fake())
    assert [one.name for one in found] == ["ngram", "one"]
    assert all(one.speculative["num_speculative_tokens"] == 5 and not one.is_ours for one in found)
    assert found[0].speculative["prompt_lookup_max"] == 5 and found[1].speculative["model"] == "an/eagle"
    assert [(one.name, one.reason) for one in missing] == [
        ("suffix", "arctic-inference is not installed"),
        ("MTP", "the target bundles no MTP layers that vLLM serves"),
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    found, missing = peers(["suffix"], [], None, Fake())
    assert found[0].speculative == {"method": "suffix"} and not missing


def test_mtp_layers_are_a_row_by_themselves() -> None:
    assert peers(["mtp"], [], None, Fake(2))[0][0].speculative == {"method": "mtp", "num_speculative_tokens": 2}
    assert peers(["mtp"], [], 4, Fake(2))[0][0].speculative["num_speculative_tokens"] == 4
    found, _ = peers([], [("again", {"method": "mtp"})], None, Fake(2))
    assert found[0].speculative == {"method": "mtp", "num_speculative_tokens": 2}


def test_a_peer_that_is_given_keeps_its_number_and_is_refused_as_vllm_does() -> None:
    given = {"method": "eagle", "model": "m", "num_speculative_tokens": 7}
    assert peers([], [("e", given)], 3, Fake())[0][0].speculative == given
    with pytest.raises(UsageError, match="--peer e: no such method"):
        peers([], [("e", {"method": "eagel"})], None, Fake())
    with pytest.raises(UsageError, match="type --heads FOLDER"):
        peers([], [("e", {"method": "mtpc", "model": "FOLDER"})], None, Fake())
