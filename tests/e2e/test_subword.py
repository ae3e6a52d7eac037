"""Targets of several families served with heads that borrow their lm_head.

Every draft of the engine is the one that the head computes on transformers' hidden states and lm_head, tied, capped or
neither; the answer is transformers' own, token for token; and the lm_head is read once a step for all of it.
"""

from __future__ import annotations

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

from tests.support.engine import Call, Engine, Reply, run
from tests.support.models import make_head
from tests.support.predicted import Prediction, predict
from tests.support.quantised import quantise

VOCAB, WINDOW, COMPONENTS, LENGTH = 70, 4, 3, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=None),
    # both caps low enough to matter
    "gemma2": Gemma2Config(
        **SIZES, query_pre_attn_scalar=32, final_logit_softcapping=3.0, attn_logit_softcapping=2.0, sliding_window=64
    ),
}
PROMPTS = [[3, 9, 4], [7, 60, 1, 12, 5, 2]]
GREEDY = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
EVERY_DRAFT = {"num_speculative_tokens_per_batch_size": "off", "min_acceptance": 0, "head_dtype": "float32"}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def make_target(folder: Path, config: PretrainedConfig) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def make(folder: Path, family: str) -> Path:
    """`folder`/FAMILY/target and `head` next to it."""
    place = folder / family.replace(" ", "-")
    target = make_target(place / "target", FAMILIES[family])
    make_head(place / "head", target, "btree", WINDOW, COMPONENTS, steps=70, head="shared", expander_rank=16)
    return place


def engine(place: Path, prompts: list[list[int]] = PROMPTS, injected: str | None = None, **arguments: Any) -> Engine:
    if injected:
        arguments["speculative_config"] = {"method": "mtpc", "model": str(place / "head"), **EVERY_DRAFT}
    # one request at a time: then the steps of a request are those that follow each other
    arguments = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 1, **arguments}
    return Engine(str(place / "target"), [Call(prompts, [GREEDY] * len(prompts))], arguments, injected)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("subword")
    return {family: make(folder, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def on_v1(made: dict[str, Path]) -> dict[str, list[Reply]]:
    return run({family: engine(place, injected="note drafts") for family, place in made.items()}, "v1")


def expected(place: Path) -> list[Prediction]:
    return predict(place / "target", place / "head", PROMPTS, LENGTH, torch.float32)


def answered(reply: list[Reply]) -> Reply:
    return reply[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_equal_the_head_on_transformers(
    made: dict[str, Path], on_v1: dict[str, list[Reply]], family: str
) -> None:
    reply, wanted = answered(on_v1[family]), expected(made[family])
    assert [answer for (answer,) in reply.tokens] == [one.answer[:LENGTH] for one in wanted]
    steps = [step for one in wanted for step in one.steps]
    accepted = sum(step.accepted for step in steps)
    assert 0 < accepted < len(steps) * (WINDOW - 1)
    assert reply.metrics[ACCEPTED] == accepted
    drafts = [drafts for (drafts,), _ in reply.recorded]
    assert drafts == [one for made in wanted for one in [*(step.drafts for step in made.steps), made.last]]


@pytest.mark.parametrize("family", FAMILIES)
def test_lm_head_is_read_once_per_step(on_v1: dict[str, list[Reply]], family: str) -> None:
    """x_1 and all drafts, every component: one call, however many they are."""
    shapes = [shapes for _, shapes in answered(on_v1[family]).recorded]
    assert shapes and all(one == [(1, WINDOW, COMPONENTS, 64)] for one in shapes)


def test_lm_head_without_soft_cap_is_found(made: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault the test above has to find: an lm_head without the cap drafts something else."""
    import tests.support.predicted as module

    wanted = expected(made["gemma2"])
    monkeypatch.setattr(module, "lm_head_of", lambda target: lambda states: target.lm_head(states))
    assert [one.steps for one in expected(made["gemma2"])] != [one.steps for one in wanted]


@pytest.mark.slow
def test_quantised_target_keeps_its_text(made: dict[str, Path], tmp_path: Path) -> None:
    """int8 layers with an lm_head left out, and an int8 lm_head, through vLLM's own: the output is the target's."""
    engines = {}
    for name, quantises_head in (("layers", False), ("lm_head", True)):
        place = tmp_path / name
        quantise(made["qwen2"] / "target", place / "target", lm_head=quantises_head)
        (place / "head").symlink_to(made["qwen2"] / "head")
        engines |= {f"{name} plain": engine(place), name: engine(place, injected="note drafts")}
    replies = {name: answered(reply) for name, reply in run(engines, "v1").items()}
    for name in ("layers", "lm_head"):
        assert replies[name].tokens == replies[f"{name} plain"].tokens
        assert replies[name].metrics[ACCEPTED] > 0


@pytest.mark.slow
def test_capped_and_tied_target_on_v2(made: dict[str, Path]) -> None:
    place = made["gemma2"]
    (wanted,) = predict(place / "target", place / "head", PROMPTS[:1], LENGTH, torch.float32)
    asked = {"drafted": engine(place, PROMPTS[:1], "drafts by kernel")}
    reply = answered(run(asked, "v2", async_scheduling=True)["drafted"])
    assert reply.tokens[0][0] == wanted.answer[:LENGTH]
    drafts = [tokens.tolist()[0] for tokens, _ in reply.recorded]
    # asynchronous scheduling may run a step more than is needed
    assert drafts[: len(wanted.steps)] == [step.drafts for step in wanted.steps]
