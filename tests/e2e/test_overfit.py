"""Training and serving fit together: a head that memorised its text has every draft accepted in vLLM.

Whatever is wrong between the trainer and the engine (a window off by one, another hidden state, another order of
positions or sums) costs drafts here, however good the head is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import engine
from tests.support.models import make_target
from tests.support.requests import ALL_DRAFTS
from tests.support.training import V, losses, make_trainer, options_for
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.heads import build_head
from vllm_mtpc.hf import Target, load_target

PROMPT, NEW, WINDOW = 4, 17, 4
KINDS = {  # circuits and heads
    "ff": {"circuit": "ff", "components": 1},
    "cp": {"circuit": "cp"},
    "hmm": {"circuit": "hmm"},
    "btree": {"circuit": "btree"},
    "shared": {"head": "shared", "circuit": "hmm"},
    "mlp": {"head": "mlp"},
    "transformer": {"head": "transformer"},
}


@torch.no_grad()
def greedy_text(target: Target, prompt: list[int]) -> list[int]:
    """The prompt and its greedy continuation, some tokens past what is served: the last step's drafts are counted."""
    tokens = list(prompt)
    while len(tokens) < PROMPT + NEW + WINDOW:
        tokens.append(int(target.logits(target.hidden(torch.tensor([tokens])))[0, -1].argmax()))
    return tokens


NIGHTLY = ("cp", "hmm", "transformer")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, engine.Reply]:
    return serve(tmp_path_factory.mktemp("overfit"), [name for name in KINDS if name not in NIGHTLY])


def serve(folder: Path, names: Sequence[str]) -> dict[str, engine.Reply]:
    make_target(folder / "target", V, seed=1)
    target = load_target(folder / "target")
    prompts = [[1, 2, 3, 4], [7, 0, 7, 5]]
    texts = [greedy_text(target, prompt) for prompt in prompts]
    trained = [np.arange(len(text)) >= PROMPT for text in texts]
    documents = Documents.join(list(zip(texts, trained, strict=True)))
    sampling = [{"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True} for _ in prompts]
    engines, options = {}, {"method": "mtpc", **ALL_DRAFTS}
    for name in names:
        fit(target, documents, folder / name, KINDS[name])
        engines[name] = engine.Engine(
            str(folder / "target"),
            [engine.Call(prompts, sampling)],
            {"speculative_config": {**options, "model": str(folder / name)}, "skip_tokenizer_init": True},
        )
    replies = engine.run(engines, "v1")
    for reply in replies.values():
        assert reply[0].tokens == [[text[PROMPT : PROMPT + NEW]] for text in texts]
    return {name: reply[0] for name, reply in replies.items()}


def fit(target: Target, documents: Documents, out: Path, kind: dict) -> None:
    options = options_for(
        target, out, max_steps=400, windows_per_step=200, block_rows=8, learning_rate=2e-2, gamma=1.0,
        **{"components": 2, "window": WINDOW, **kind},
    )  # fmt: skip
    trainer = make_trainer(options, target, documents)
    trainer.train()
    assert losses(out)[-1] < 0.02, kind
    config = options.trainer(options, target).config
    head = build_head(config)
    head.load_state_dict(trainer.weights())
    save_head(out, config, head, {}, "memorised", torch.float32)


def check(metrics: dict[str, float]) -> None:
    drafted, accepted = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert drafted >= 2 * (NEW // WINDOW) * (WINDOW - 1)
    assert accepted == drafted


@pytest.mark.parametrize("name", [name for name in KINDS if name not in NIGHTLY])
def test_every_draft_of_a_memorised_text_is_accepted(served: dict[str, engine.Reply], name: str) -> None:
    check(served[name].metrics)


@pytest.mark.slow
def test_every_draft_of_a_memorised_text_is_accepted_by_more_heads(tmp_path: Path) -> None:
    for reply in serve(tmp_path, NIGHTLY).values():
        check(reply.metrics)
