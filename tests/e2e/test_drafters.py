"""A converted DFlash or DSpark drafter drafts what vLLM's own speculator drafts from the checkpoint, token for token.

Both in engines of Model Runner V2, interpreted, float32; and the drafts of both follow the checkpoint's formula
(tests/support/drafters.py), by which the conversion is tested without an engine (tests/checkpoint/).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import drafters
from tests.support.engine import Call, Engine, Reply, run
from tests.support.models import make_target
from tests.support.requests import ALL_DRAFTS
from vllm_mtpc.cli import main
from vllm_mtpc.hf import load_target

PROMPTS = [[3, 9, 4], [7, 30, 1, 12, 5, 2, 41, 8, 8, 19]]
LENGTH = 12
GREEDY = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
SMALL = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 2}


def engines(place: Path, layout: str, kind: str, drafts: int) -> dict[str, Engine]:
    calls, target = [Call(PROMPTS, [GREEDY] * len(PROMPTS))], str(place / "target")
    theirs = {"method": kind, "model": str(place / layout / "source"), "num_speculative_tokens": drafts}
    ours = {"method": "mtpc", "model": str(place / layout / "head"), **ALL_DRAFTS}
    return {
        f"{layout}, theirs": Engine(target, calls, {**SMALL, "speculative_config": theirs}, "note their drafts"),
        f"{layout}, ours": Engine(target, calls, {**SMALL, "speculative_config": ours}, "backbone"),
    }


def drafted(reply: Reply) -> dict[tuple[int, int], list[int]]:
    """Drafts by request and tokens read, after whole prompts."""
    return {
        (one["request"], one["prefix"]): one["drafts"].tolist()
        for one in reply.recorded
        if one["prefix"] >= len(PROMPTS[one["request"]])
    }


@pytest.mark.slow
def test_drafts_equal_those_of_vllm_speculators(tmp_path: Path) -> None:
    model = make_target(tmp_path / "target", 48, seed=0, layers=4)
    wanted, every = {}, {}
    for layout in drafters.LAYOUTS:
        kind = layout.split()[1]
        source = drafters.make(tmp_path / layout / "source", layout, model)
        words = ["--target", str(tmp_path / "target"), "--out", str(tmp_path / layout / "head")]
        assert main(["convert", str(source), *words]) == 0
        drafts = drafters.BLOCK - (kind == "dflash")
        every |= engines(tmp_path, layout, kind, drafts)
        wanted[layout] = drafters.Reference(source, load_target(tmp_path / "target").model, kind == "dspark"), drafts
    replies = run(every, "v2", async_scheduling=False)
    for layout, (reference, drafts) in wanted.items():
        theirs, ours = (replies[f"{layout}, {whose}"] for whose in ("theirs", "ours"))
        assert theirs[0].tokens == ours[0].tokens
        found = drafted(theirs[0])
        assert len(found) > LENGTH and len({tuple(tokens) for tokens in found.values()}) > LENGTH // 2
        assert drafted(ours[0]) == found
        for (request, prefix), tokens in found.items():
            text = PROMPTS[request] + theirs[0].tokens[request][0]
            if prefix < len(text):
                assert reference.greedy(text[:prefix], text[prefix], drafts) == tokens
