"""Heads on the drafters of vLLM: untrained ones draft what vLLM's own speculator drafts, on Model Runner V2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import drafters
from tests.support.engine import TWO_RANKS, Engine, ask, build, run
from tests.support.hosted import make_eagle3, make_glm, make_hosted, make_mimo
from tests.support.models import make_target
from tests.support.requests import ALL_DRAFTS, PROMPTS, VOCAB
from vllm_mtpc.checkpoint import read_circuit_config
from vllm_mtpc.cli import main

SHARED = [5, 6, 7, 8] * 8  # one block
CALLS = [
    ask(PROMPTS, 12),
    ask(PROMPTS, 12, temperature=1.0),
    ask([[*SHARED, 9, 1, 3]], 6),  # read in pieces
    # found in the prefix cache: the drafter's last keys and values of the shared block depend on the token after it
    ask([[*SHARED, token, *range(9)] for token in range(20, 28)], 12, temperature=1.0),
]
SAMPLED_CALLS = (1, 3)
SAMPLED = {"draft_sample_method": "probabilistic"}
COMMON = {"trust_remote_code": True, "max_num_batched_tokens": 32, "block_size": 32, "max_model_len": 96}


def make_blocks(place: Path, layout: str) -> dict[str, Any]:
    """A DFlash or DSpark checkpoint and the head that `convert` makes of it; returns vLLM's own config."""
    model, kind = make_target(place / "target", VOCAB, seed=0, layers=4), layout.split()[1]
    source = drafters.make(place / "source", layout, model)
    words = ["convert", str(source), "--target", str(place / "target"), "--out", str(place / "head")]
    assert main(words) == 0
    return {"method": kind, "model": str(source), "num_speculative_tokens": drafters.BLOCK - (kind == "dflash")}


def make_case(place: Path, name: str) -> dict[str, Any]:
    """The target and an untrained head of a case; returns vLLM's own config of the drafter."""
    if name in drafters.LAYOUTS:
        return make_blocks(place, name)
    if name == "eagle3":
        target = make_target(place / "target", VOCAB, seed=0)
        make_eagle3(place / "drafter", target)
        drafter = {"method": "eagle3", "model": "../drafter"}
        make_hosted(place / "head", target.config.to_dict(), drafter)
        return {"method": "eagle3", "model": str(place / "drafter"), "num_speculative_tokens": 1}
    config = {"mimo": make_mimo, "glm": make_glm}[name](place / "target")
    make_hosted(place / "head", config, {"method": "mtp"})
    return {"method": "mtp", "num_speculative_tokens": 1}


def engines(place: Path, name: str) -> dict[str, Engine]:
    theirs = SAMPLED | make_case(place, name)
    made = build(place, "head", CALLS, **COMMON)
    own = made.arguments["speculative_config"]
    return {
        f"{name}, theirs": Engine(made.model, CALLS, made.arguments | {"speculative_config": theirs}),
        f"{name}, ours": Engine(made.model, CALLS, made.arguments | {"speculative_config": own | ALL_DRAFTS}),
        f"{name}, none": Engine(made.model, CALLS, made.arguments | {"speculative_config": None}),
    }


@pytest.mark.parametrize(
    "name",
    ["mimo", "speculators dspark", *(pytest.param(name, marks=pytest.mark.slow) for name in
     ("glm", "eagle3", "speculators dflash", "original dflash", "original dspark"))],
)  # fmt: skip
def test_untrained_head_drafts_what_vllm_drafts(tmp_path: Path, name: str) -> None:
    """Sampled texts depend on every draft: equal texts and equal counts of accepted drafts are equal drafts."""
    replies = run(engines(tmp_path, name), "v2", async_scheduling=False)
    theirs, ours, none = (replies[f"{name}, {whose}"] for whose in ("theirs", "ours", "none"))
    for number, (a, b, plain) in enumerate(zip(theirs, ours, none, strict=True)):
        assert a.tokens == b.tokens
        assert (a.accepted, a.drafted) == (b.accepted, b.drafted)
        assert (b.tokens == plain.tokens) == (number not in SAMPLED_CALLS)  # greedy texts are the target's
    assert ours[-1].accepted > 0


def make_circuit(place: Path, name: str) -> None:
    """The target of a case, and in `circuit` a head whose components differ."""
    make_case(place, name)
    untrained = read_circuit_config(place / "head")
    given = {"circuit": "hmm", "window": 5, "num_components": 4, "leaves": {"component_rank": 4}, "noise": 0.3}
    sizes = {name: getattr(untrained, name) for name in ("vocab_size", "hidden_size")}
    make_hosted(place / "circuit", sizes, untrained.hosted.model_dump(), **given)


@pytest.mark.parametrize("name", ["mimo", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_circuit_on_a_drafter_keeps_greedy_text(tmp_path: Path, name: str) -> None:
    make_circuit(tmp_path, name)
    every = {name: build(tmp_path, head, CALLS, **COMMON) for name, head in (("ours", "circuit"), ("none", None))}
    replies = run(every, "v2", async_scheduling=False)
    for ours, none, number in zip(replies["ours"], replies["none"], range(len(CALLS)), strict=True):
        assert ours.drafted == 4 * ours.steps > 0
        assert number in SAMPLED_CALLS or ours.tokens == none.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mimo", "glm", "eagle3"])
def test_two_ranks_draft_what_one_drafts(tmp_path: Path, name: str) -> None:
    """Each rank has the logits of its part of the drafter's lm_head; sampled texts depend on every draft."""
    make_circuit(tmp_path, name)
    divided = {"tensor_parallel_size": 2, "worker_extension_cls": "tests.support.workers.Divides"}
    (one,) = run({"one": build(tmp_path, "circuit", CALLS, **COMMON)}, "v2", async_scheduling=False).values()
    made = build(tmp_path, "circuit", CALLS, **COMMON, **divided)
    (two,) = run({"two": made}, "v2", async_scheduling=False, **TWO_RANKS).values()
    for a, b in zip(one, two, strict=True):
        assert (a.tokens, a.accepted, a.drafted) == (b.tokens, b.accepted, b.drafted)
    assert two[-1].accepted > 0
