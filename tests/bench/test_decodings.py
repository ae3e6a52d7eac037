"""Ways of decoding that `bench serve` compares: their names, their engines, and those that cannot run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from vllm_mtpc import demo
from vllm_mtpc.bench import decodings
from vllm_mtpc.bench.decodings import find_heads, find_peers
from vllm_mtpc.errors import CheckpointError, UsageError

NAMES = [str(demo.path(name)) for name in (*demo.CIRCUITS, *demo.PTP)]


def test_heads_that_need_v2_are_missing_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((demo.path("btree") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "lora_layers": 2}))
    names = [*NAMES, str(tmp_path)]
    found, missing = find_heads(names, {}, None, on_gpu=False)
    assert [one.circuit for one in found] == ["ff", "cp", "hmm", "btree"] and len(missing) == 4
    assert all(one.is_ours and one.is_required and not one.is_plain for one in found)
    assert all("needs a GPU" in one.reason and one.is_required for one in missing)
    on_gpu, _ = find_heads(names, {}, 3, on_gpu=True)
    assert [one.speculative["method"] for one in on_gpu] == ["mtpc"] * 4 + ["ptp"] * 3 + ["mtpc"]
    assert {one.speculative["num_speculative_tokens"] for one in on_gpu} == {3}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert len(find_heads(names, {}, None, on_gpu=False)[0]) == 8


def test_heads_have_different_names(tmp_path: Path) -> None:
    found, _ = find_heads(NAMES, {}, None, on_gpu=True)
    assert [one.name for one in found] == ["ff (Medusa-style)", "cp", "hmm", "btree", "o-ptp", "c-ptp", "late"]
    places = [tmp_path / place for place in ("a/head", "b/head", "b/mine")]
    for place in places:
        place.mkdir(parents=True)
        (place / "config.json").write_bytes((demo.path("ff") / "config.json").read_bytes())
    kind = " [ff (Medusa-style)]"
    for few, names in ((places[1:], ["head", "mine"]), (places, ["a/head", "b/head", "b/mine"])):
        found, _ = find_heads(list(map(str, few)), {}, None, False)
        assert [one.name for one in found] == [f"{name}{kind}" for name in names]
    with pytest.raises(UsageError, match="named twice"):
        find_heads([NAMES[0], NAMES[0]], {}, None, on_gpu=False)
    with pytest.raises(CheckpointError, match="no head"):
        find_heads(["/no/such/head"], {}, None, on_gpu=False)


def test_variants_are_rows_of_their_own() -> None:
    found, _ = find_heads(NAMES[3:4], {"K=3": {"num_speculative_tokens": 3}}, None, on_gpu=False)
    assert [one.name for one in found] == ["btree", "btree, K=3"]
    assert found[1].speculative == {"method": "mtpc", "model": NAMES[3], "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("names", "configured", "num_drafts", "layers", "wanted"),
    [
        (["ngram"], {}, None, 0, {"ngram": 5}),
        (["suffix"], {}, None, 0, {"suffix": None}),
        (["mtp"], {}, None, 2, {"MTP": 2}),
        (["mtp"], {}, 4, 2, {"MTP": 4}),
        ([], {"e": {"method": "eagle", "model": "m"}}, None, 0, {"e": 5}),
        ([], {"e": {"method": "eagle", "model": "m", "num_speculative_tokens": 7}}, 3, 0, {"e": 7}),
    ],
)
def test_peers_have_a_number_of_drafts(monkeypatch, names, configured, num_drafts, layers, wanted) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
    monkeypatch.setattr(decodings, "count_mtp_layers", lambda engine: layers)
    found, missing = find_peers(names, configured, num_drafts, {})
    assert {one.name: one.speculative.get("num_speculative_tokens") for one in found} == wanted and not missing
    assert [one.is_required for one in found] == [bool(configured)] and not found[0].is_ours


def test_peers_that_cannot_run_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(decodings, "count_mtp_layers", lambda engine: 0)
    found, missing = find_peers(["suffix", "mtp"], {}, None, {})
    assert not found and missing == [
        ("suffix", "arctic-inference is not installed", False),
        ("MTP", "the target bundles no MTP layers that vLLM serves", False),
    ]
    with pytest.raises(UsageError, match="type --heads FOLDER"):
        find_peers([], {"e": {"method": "mtpc", "model": "FOLDER"}}, None, {})
