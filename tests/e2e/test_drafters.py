"""A converted DFlash or DSpark drafter drafts what vLLM's own speculator drafts from the checkpoint, token for token.

Both in engines of Model Runner V2, interpreted, float32; and the drafts of both follow the checkpoint's formula
(tests/support/drafters.py), by which the conversion is tested without an engine (tests/checkpoint/).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import drafters
from tests.support.engine import Reply, ask, build, run
from tests.support.models import make_target
from tests.support.requests import ALL_DRAFTS
from vllm_mtpc.cli import main
from vllm_mtpc.hf import load_target

PROMPTS = [[3, 9, 4], [7, 30, 1, 12, 5, 2, 41, 8, 8, 19]]
LENGTH = 12


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
    wanted, every, calls = {}, {}, [ask(PROMPTS, LENGTH)]
    for layout in drafters.LAYOUTS:
        kind = layout.split()[1]
        source, head = tmp_path / layout / "source", f"{layout}/head"
        drafters.make(source, layout, model)
        assert main(["convert", str(source), "--target", str(tmp_path / "target"), "--out", str(tmp_path / head)]) == 0
        drafts = drafters.BLOCK - (kind == "dflash")
        theirs = {"method": kind, "num_speculative_tokens": drafts}
        every[f"{layout}, theirs"] = build(tmp_path, f"{layout}/source", calls, "note their drafts", theirs)
        every[f"{layout}, ours"] = build(tmp_path, head, calls, "backbone", ALL_DRAFTS)
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
