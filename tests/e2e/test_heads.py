"""Every head, and targets of several families, served: drafts and text are those computed on transformers.

The prediction runs the head on transformers' hidden states, with transformers' lm_head where the head needs one: tied,
capped or neither. Only a worker that reads the same states, binds the same lm_head and computes the same conditionals
drafts the same tokens.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.engine import Engine, Reply, ask, build, run
from tests.support.models import make_head
from tests.support.requests import ALL_DRAFTS
from vllm_mtpc.checkpoint import load_head

WINDOW, COMPONENTS, LENGTH = 4, 3, 24
SIZES = {
    "vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**{**SIZES, "vocab_size": 30}, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=None),
    # tied; both caps low enough to matter
    "gemma2": Gemma2Config(
        **SIZES, query_pre_attn_scalar=32, final_logit_softcapping=3.0, attn_logit_softcapping=2.0, sliding_window=64
    ),
}
HEADS: dict[str, dict[str, Any]] = {
    "linear": {},
    "shared": {"leaves": {"kind": "lm_head", "expander_rank": 16}},
    "low rank": {"leaves": {"kind": "lm_head", "expander_rank": 8, "component_rank": 8, "token_rank": 4}},
    "every second id": {"ids": list(range(0, 30, 2))},
    "every second id, lm_head": {
        "ids": list(range(1, 30, 2)),
        "trunk": {"kind": "mlp"},
        "leaves": {"kind": "lm_head", "component_rank": 4},
    },
    "mlp": {"trunk": {"kind": "mlp"}},
    "mlp, lm_head": {"trunk": {"kind": "mlp"}, "leaves": {"kind": "lm_head", "expander_rank": 8, "component_rank": 4}},
}
EVERY_RUN = [("gemma2", "shared"), *(("llama", head) for head in HEADS if head != "shared")]
NIGHTLY = [(family, "shared") for family in FAMILIES if family != "gemma2"]
PROMPTS = [[3, 9, 4], [7, 29, 1, 12, 5, 2]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a target of a family and of the head next to it."""
    folder = tmp_path_factory.mktemp("heads")

    def make(family: str, head: str) -> Path:
        place = folder / family / head
        torch.manual_seed(1)
        target = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager").eval()
        target.save_pretrained(place / "target")
        make_head(place / "head", target, "btree", WINDOW, COMPONENTS, steps=70, **HEADS[head])
        return place

    return cache(make)


def engine(place: Path, injected: str) -> Engine:
    """One request at a time: then the steps of a request are those that follow each other."""
    spec = {**ALL_DRAFTS, "head_dtype": "float32"}
    return build(place, "head", [ask(PROMPTS, LENGTH)], injected, spec, max_num_seqs=1)


@torch.inference_mode()
def predict(place: Path, is_capped: bool = True) -> list[tuple[list[int], list[list[int]], int]]:
    """Greedy decoding with the head, from transformers' hidden states and lm_head alone.

    Returns:
        For each prompt the answer (longer than was asked for), the drafts of each step (the last ones are not
        verified), and the number of accepted drafts.
    """
    # eager: transformers' other attentions leave out the soft cap of attention logits
    target = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32, attn_implementation="eager")
    _, head = load_head(place / "head", torch.float32)
    if head.trunk.needs_embedding:
        head.trunk.bind_embedding(target.get_input_embeddings())
    if head.leaves.needs_lm_head:
        cap, ids = is_capped and getattr(target.config, "final_logit_softcapping", None), slice(None)
        ids = ids if head.vocabulary is None else head.vocabulary.ids

        def logits(states: torch.Tensor) -> torch.Tensor:
            found = target.lm_head(states)[..., ids]
            return torch.tanh(found / cap) * cap if cap else found

        head.leaves.bind_lm_head(logits)
    found = []
    for prompt in PROMPTS:
        text = torch.tensor([prompt])
        for _ in range(LENGTH + WINDOW):  # the last step may draft beyond the last token that is asked for
            text = torch.cat([text, target(text).logits[:, -1:].argmax(-1)], 1)
        hidden = target.model(text).last_hidden_state[0]
        end, steps, total = len(prompt) + 1, [], 0  # tokens so far; the first one comes from reading the prompt
        while True:
            params = head(hidden[end - 2 : end - 1], text[:, end - 1])
            steps.append(head.circuit.greedy(params, text[:, end - 1 : end])[0, 1:])
            if end >= len(prompt) + LENGTH:
                break
            accepted = int((steps[-1] == text[0, end : end + WINDOW - 1]).long().cumprod(0).sum())
            end, total = end + accepted + 1, total + accepted
        found.append((text[0, len(prompt) :].tolist(), [drafts.tolist() for drafts in steps], total))
    return found


def check(place: Path, reply: Reply) -> list[list[list[int]]]:
    """Text and the number of accepted drafts are the predicted ones; returns the drafts of each prompt's steps."""
    answers, drafts, accepted = zip(*predict(place), strict=True)
    assert [answer for (answer,) in reply.tokens] == [answer[:LENGTH] for answer in answers]
    assert 0 < sum(accepted) < (WINDOW - 1) * sum(len(steps) - 1 for steps in drafts)  # accepted and rejected
    assert reply.accepted == sum(accepted)
    return list(drafts)


@pytest.mark.parametrize("cases", [EVERY_RUN, pytest.param(NIGHTLY, marks=pytest.mark.slow)], ids=["some", "others"])
def test_drafts_and_text_equal_the_head_on_transformers(place: Any, cases: list[tuple[str, str]]) -> None:
    for case, (reply,) in run({case: engine(place(*case), "noted drafts v1") for case in cases}, "v1").items():
        wanted = check(place(*case), reply)
        assert [drafts for (drafts,) in reply.recorded] == [drafts for steps in wanted for drafts in steps], case


def test_capped_and_tied_target_on_v2_accepts_predicted_drafts(place: Any) -> None:
    """An lm_head without the cap would draft something else."""
    made = place("gemma2", "shared")
    (reply,) = run({"shared": engine(made, "noted states")}, "v2")["shared"]
    first = check(made, reply)[0][:-1]
    assert [note["drafts"].tolist() for note in reply.recorded][: len(first)] == first
    assert [steps for _, steps, _ in predict(made, is_capped=False)] != [steps for _, steps, _ in predict(made)]
