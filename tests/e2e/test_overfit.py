"""A head that memorised its text has every draft accepted in vLLM.

Whatever differs between the trainer and the engine (windows, hidden states, the order of positions) costs drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.backbones import Target
from tests.support.engine import ask, build, run
from tests.support.models import make_target
from tests.support.requests import ALL_DRAFTS
from tests.support.training import V, losses, make_trainer, options_for
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.heads.head import build_head
from vllm_mtpc.hf import load_target

PROMPTS, NEW, WINDOW = [[1, 2, 3, 4], [7, 0, 7, 5]], 17, 4
KINDS = {"btree": {"circuit": "btree"}, "shared": {"leaves": "lm_head", "circuit": "hmm"}}  # circuits and heads


def test_every_draft_of_a_memorised_text_is_accepted(tmp_path: Path) -> None:
    make_target(tmp_path / "target", V, seed=1)
    # some tokens past what is served: the last step's drafts are counted
    reader = Target(tmp_path / "target", [])
    texts = [prompt + reader.greedy(prompt, NEW + WINDOW) for prompt in PROMPTS]
    documents = [(np.array(text), np.arange(len(text)) >= len(PROMPTS[0])) for text in texts]
    engines = {}
    for name in KINDS:
        fit(tmp_path, documents, tmp_path / name, KINDS[name])
        engines[name] = build(tmp_path, name, [ask(PROMPTS, NEW)], spec=ALL_DRAFTS)
    for name, (reply,) in run(engines, "v1").items():
        assert reply.tokens == [[text[4 : 4 + NEW]] for text in texts], name
        assert reply.drafted >= 2 * (NEW // WINDOW) * (WINDOW - 1), name
        assert reply.accepted == reply.drafted, name


def fit(place: Path, documents: Documents, out: Path, kind: dict[str, Any]) -> None:
    target, how = load_target(place / "target"), {"components": 2, "window": WINDOW, **kind}
    how |= {"max_steps": 400, "windows_per_step": 200, "block_rows": 8, "learning_rate": 2e-2, "gamma": 1.0}
    options = options_for(target, out, **how)
    trainer = make_trainer(options, target, documents)
    trainer.train()
    assert losses(out)[-1] < 0.02, kind
    config = options.trainer(options, target).config
    head = build_head(config)
    head.load_state_dict(trainer.model.head.state_dict())
    save_head(out, config, head, {}, "memorised", torch.float32)
