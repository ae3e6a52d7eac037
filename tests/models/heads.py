"""Draft heads that know a little of a model's answers, so that drafts are accepted and rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.e2e.engine import Reply
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config import HeadConfig
from vllm_mtpc.heads import build_head


def fit_head(folder: Path, reference: Any, sizes: dict[str, Any], prompts: list[list[int]], count: int) -> None:
    """A btree head (n=4, r=2) overfitted to the first `count` tokens of the greedy answers to `prompts`."""
    window = 4
    config = HeadConfig.create(circuit="btree", window=window, num_components=2, target=sizes, verifier="../target")
    torch.manual_seed(0)
    head = build_head(config)
    texts = [prompt + reference.greedy(prompt, count) for prompt in prompts]
    hidden = torch.cat([reference.hidden(text)[:-window] for text in texts])
    windows = torch.cat([torch.tensor(text[1:]).unfold(0, window, 1) for text in texts])
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-2)
    for _ in range(60):
        loss = -head.circuit.conditional_log_probs(head(hidden), windows).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_head(folder, config, head, {"command": "tests"}, "made by a test", torch.float32)


def check_greedy(reference: Any, prompts: list[list[int]], replies: list[Reply] | str, count: int) -> None:
    """Every answer has `count` tokens, each the most probable one of the reference."""
    assert not isinstance(replies, str), replies
    for reply in replies:
        for prompt, samples in zip(prompts, reply.tokens, strict=True):
            assert len(samples[0]) == count
            assert reference.is_greedy(prompt, samples[0])


def drafts(reply: Reply) -> tuple[int, int]:
    """Accepted and rejected drafts."""
    drafted, accepted = (reply.metrics[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted"))
    return accepted, drafted - accepted
