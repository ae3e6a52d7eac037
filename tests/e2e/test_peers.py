"""vLLM's own methods as `bench serve` puts them next to heads: really served, greedy output token for token plain's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine import Engine, ask, run_with_plain
from tests.support.peers import make_mimo
from tests.support.requests import prompt
from vllm_mtpc import demo
from vllm_mtpc.bench.decodings import find_peers


@pytest.mark.parametrize("name", ["mtp", pytest.param("itself", marks=pytest.mark.slow)])
def test_peer_is_served(name: str, tmp_path: Path) -> None:
    """The MTP layer of a target; a method that is given: the demo target as its own draft model."""
    if name == "mtp":
        make_mimo(tmp_path)
        target, prompts = tmp_path, [[3, 5, 7, 9], [1, 2]]
        (peer,) = find_peers(["mtp"], {}, {"model": str(target), "dtype": "float32"})
        assert peer.speculative == {"method": "mtp", "num_speculative_tokens": 1}
    else:
        target, prompts = demo.path("target"), [prompt(40), prompt(25, 3)]
        given = {name: {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3}}
        (peer,) = find_peers([], given, {"model": str(target), "dtype": "float32"})
    engine = Engine(str(target), [ask(prompts, 48)], {"speculative_config": peer.speculative, "max_model_len": 240})
    (found,), (plain,) = run_with_plain(engine, "v1")
    assert found.tokens == plain.tokens
    rate = found.accepted / found.drafted
    assert 0 < rate < 1 if name == "mtp" else rate > 0.95
