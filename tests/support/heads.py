"""Draft heads that know a little of a model's answers, so that drafts are accepted and rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.engine import Call, Reply
from tests.support.models import lora_section, minimise
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.adapters import Adapters
from vllm_mtpc.heads.head import build_head


def fit_head(
    folder: Path,
    reference: Any,
    sizes: dict[str, Any],
    prompts: list[list[int]],
    count: int,
    reads: Any = None,
    adapters: Adapters | None = None,
) -> None:
    """A btree head (n=4, r=2) overfitted to the first `count` tokens of the greedy answers to `prompts`.

    With `adapters` of draft layers it reads the states of the model `reads`.
    """
    window = 4
    given = {"circuit": "btree", "window": window, "num_components": 2, "target": sizes, "verifier": "../target"}
    config = HeadConfig.create(**given, trunk=lora_section(adapters) if adapters else None)
    torch.manual_seed(0)
    head = build_head(config)
    texts = [prompt + reference.greedy(prompt, count) for prompt in prompts]
    hidden = torch.cat([(reads or reference).hidden(text)[:-window] for text in texts])
    windows = torch.cat([torch.tensor(text[1:]).unfold(0, window, 1) for text in texts])
    minimise(lambda: -head.circuit.conditional_log_probs(head(hidden, windows[:, 0]), windows).mean(), head, 60, 3e-2)
    save_head(folder, config, head, {"command": "tests"}, "made by a test", torch.float32, adapters)


def check_greedy(reference: Any, prompts: list[list[int]], replies: list[Reply], count: int) -> None:
    """Every answer has `count` tokens, each the most probable one of the reference."""
    for reply in replies:
        for prompt, samples in zip(prompts, reply.tokens, strict=True):
            assert len(samples[0]) == count
            assert reference.is_greedy(prompt, samples[0])


def ask_twice(prompts: list[list[int]], sampling: dict[str, Any]) -> list[Call]:
    """All prompts, then the last one again, whose prefix is cached."""
    return [Call(prompts, [sampling] * len(prompts)), Call(prompts[-1:], [sampling])]


def check_twice(reference: Any, prompts: list[list[int]], replies: list[Reply], count: int) -> None:
    """The answers to `ask_twice` are greedy, with a cached prefix, and with accepted and rejected drafts."""
    first, second = replies
    check_greedy(reference, prompts, [first], count)
    check_greedy(reference, prompts[-1:], [second], count)
    assert second.metrics["vllm:prefix_cache_hits"] > first.metrics["vllm:prefix_cache_hits"]
    assert 0 < first.accepted < first.drafted
