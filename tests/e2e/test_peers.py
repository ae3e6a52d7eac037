"""vLLM's own methods as `bench serve` puts them next to heads: really served, greedy output token for token plain's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Call, Engine, Reply, run
from tests.support.peers import make_mimo, train_eagle
from tests.support.requests import prompt
from vllm_mtpc import demo
from vllm_mtpc.bench.decodings import find_peers

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 48}


def rows(target: Path, names: list[str], given: dict[str, dict[str, Any]], num_drafts: int | None = None) -> dict:
    """`speculative_config` by row of `bench serve`."""
    found, missing = find_peers(names, given, num_drafts, {"model": str(target), "dtype": "float32"})
    assert not missing
    return {one.name: one.speculative for one in found}


def served(target: Path, peers: dict[str, Any], prompts: list[list[int]]) -> dict[str, Reply]:
    """What plain vLLM and the peers answer."""
    call = Call(prompts, [GREEDY] * len(prompts))
    engines = {
        name: Engine(str(target), [call], {"speculative_config": value, "max_model_len": 240})
        for name, value in {"plain": None, **peers}.items()
    }
    replies = run(engines, "v1")
    return {name: reply[0] for name, reply in replies.items()}


def accepted(reply: Reply) -> tuple[int, int]:
    """Drafts that were accepted, and all."""
    return tuple(int(reply.metrics[f"vllm:spec_decode_num_{what}_tokens"]) for what in ("accepted", "draft"))


def test_mtp_layer_of_a_target_is_served(tmp_path: Path) -> None:
    make_mimo(tmp_path)
    peers = rows(tmp_path, ["mtp"], {})
    assert peers == {"MTP": {"method": "mtp", "num_speculative_tokens": 1}}
    replies = served(tmp_path, peers, [[3, 5, 7, 9], [1, 2]])
    assert replies["MTP"].tokens == replies["plain"].tokens
    taken, drafted = accepted(replies["MTP"])
    assert 0 < taken < drafted


@pytest.mark.slow
def test_eagle_layer_and_draft_model_are_served(tmp_path: Path) -> None:
    """The layer is trained; the target as its own draft model must be right every time."""
    train_eagle(tmp_path)
    target = demo.path("target")
    given = {
        "layer": {"method": "eagle", "model": str(tmp_path)},
        "itself": {"method": "draft_model", "model": str(target)},
    }
    replies = served(target, rows(target, [], given, num_drafts=3), [prompt(40), prompt(25, 3)])
    assert replies["layer"].tokens == replies["plain"].tokens == replies["itself"].tokens
    taken, drafted = accepted(replies["layer"])
    assert 0.1 < taken / drafted < 0.9
    taken, drafted = accepted(replies["itself"])
    assert taken > 0.95 * drafted  # drafts past the end of an answer are rejected


@pytest.mark.skipif(
    find_spec("arctic_inference") is None, reason="arctic-inference is not installed: pip install arctic-inference"
)
def test_suffix_decoding_is_served() -> None:
    target = demo.path("target")
    replies = served(target, rows(target, ["suffix"], {}), [prompt(40), prompt(25, 3)])
    assert replies["suffix"].tokens == replies["plain"].tokens and accepted(replies["suffix"])[0] > 0
