"""vLLM's own methods as `bench serve` puts them next to heads: really served, greedy output token for token plain's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine, Reply, ask, run
from tests.support.peers import make_mimo, train_eagle
from tests.support.requests import prompt
from vllm_mtpc import demo
from vllm_mtpc.bench.decodings import find_peers


def serve(
    target: Path,
    prompts: list[list[int]],
    names: list[str],
    given: dict[str, dict[str, Any]] | None = None,
    num_drafts: int | None = None,
) -> tuple[dict[str, Any], dict[str, Reply]]:
    """`speculative_config` by row of `bench serve`, and the replies of each engine: greedy text is plain vLLM's."""
    found, missing = find_peers(names, given or {}, num_drafts, {"model": str(target), "dtype": "float32"})
    assert not missing
    peers = {one.name: one.speculative for one in found}
    engines = {
        name: Engine(str(target), [ask(prompts, 48)], {"speculative_config": value, "max_model_len": 240})
        for name, value in {"plain": None, **peers}.items()
    }
    replies = {name: reply for name, (reply,) in run(engines, "v1").items()}
    assert all(reply.tokens == replies["plain"].tokens for reply in replies.values())
    return peers, replies


def test_mtp_layer_of_a_target_is_served(tmp_path: Path) -> None:
    make_mimo(tmp_path)
    peers, replies = serve(tmp_path, [[3, 5, 7, 9], [1, 2]], ["mtp"])
    assert peers == {"MTP": {"method": "mtp", "num_speculative_tokens": 1}}
    assert 0 < replies["MTP"].accepted < replies["MTP"].drafted


@pytest.mark.slow
def test_eagle_layer_and_draft_model_are_served(tmp_path: Path) -> None:
    """The layer is trained; the target as its own draft model must be right every time."""
    train_eagle(tmp_path)
    target = demo.path("target")
    given = {
        "layer": {"method": "eagle", "model": str(tmp_path)},
        "itself": {"method": "draft_model", "model": str(target)},
    }
    _, replies = serve(target, [prompt(40), prompt(25, 3)], [], given, num_drafts=3)
    layer, itself = replies["layer"], replies["itself"]
    assert 0.1 < layer.accepted / layer.drafted < 0.9
    assert itself.accepted > 0.95 * itself.drafted  # drafts past the end of an answer are rejected


@pytest.mark.skipif(
    find_spec("arctic_inference") is None, reason="arctic-inference is not installed: pip install arctic-inference"
)
def test_suffix_decoding_is_served() -> None:
    _, replies = serve(demo.path("target"), [prompt(40), prompt(25, 3)], ["suffix"])
    assert replies["suffix"].accepted > 0
