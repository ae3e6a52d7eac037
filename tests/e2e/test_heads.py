"""Every head, and targets of several families, served: drafts and text are those computed on transformers.

The prediction runs the head on transformers' hidden states, with transformers' lm_head where the head needs one: tied,
capped or neither. Only a worker that reads the same states, binds the same lm_head and computes the same conditionals
drafts the same tokens; and it reads the lm_head once per step.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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

from tests.support.engine import TWO_RANKS, Engine, Reply, ask, build, run, run_with_plain
from tests.support.models import make_head
from tests.support.quantised import quantise
from tests.support.requests import ALL_DRAFTS
from vllm_mtpc.checkpoint import load_head

WINDOW, COMPONENTS, LENGTH = 4, 3, 24
SIZES = {
    "vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, PretrainedConfig] = {
    # vLLM pads 30 to 64: of two ranks the second has no token
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
    "shared": {"expander_rank": 16},
    "mlp": {"expander_layers": 2},
    "transformer": {"expander_layers": 2, "expander_heads": 4},
    "low rank": {"head": "shared", "expander_rank": 8, "component_rank": 8, "token_rank": 4},
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
        make_head(place / "head", target, "btree", WINDOW, COMPONENTS, steps=70, **{"head": head, **HEADS[head]})
        return place

    return cache(make)


def engine(place: Path, injected: str | None = None, **arguments: Any) -> Engine:
    """One request at a time: then the steps of a request are those that follow each other."""
    spec = {**ALL_DRAFTS, "head_dtype": "float32"}
    return build(place, "head", [ask(PROMPTS, LENGTH)], injected, spec, **{"max_num_seqs": 1, **arguments})


@pytest.fixture(scope="module")
def on_v1(place: Any) -> Any:
    """Replies to all cases of every run, or to all nightly ones."""

    @cache
    def served(is_nightly: bool) -> dict[tuple[str, str], list[Reply]]:
        return run({case: engine(place(*case), "note drafts") for case in (NIGHTLY if is_nightly else EVERY_RUN)}, "v1")

    return served


class Prediction(NamedTuple):
    """One prompt's answer (longer than was asked for), and the drafts of each step; the last ones are not verified."""

    answer: list[int]
    drafts: list[list[int]]
    accepted: int


@torch.inference_mode()
def predict(place: Path, is_capped: bool = True) -> list[Prediction]:
    """What greedy decoding with the head must do, from transformers' hidden states and lm_head alone."""
    # eager: transformers' other attentions leave out the soft cap of attention logits
    target = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32, attn_implementation="eager")
    _, head = load_head(place / "head", torch.float32)
    if head.needs_lm_head:
        cap = is_capped and getattr(target.config, "final_logit_softcapping", None)
        head.bind_lm_head(lambda h: torch.tanh(target.lm_head(h) / cap) * cap if cap else target.lm_head(h))
    found = []
    for prompt in PROMPTS:
        text = torch.tensor([prompt])
        for _ in range(LENGTH + WINDOW):  # the last step may draft beyond the last token that is asked for
            text = torch.cat([text, target(text).logits[:, -1:].argmax(-1)], 1)
        hidden = target.model(text).last_hidden_state[0]
        end, steps, total = len(prompt) + 1, [], 0  # tokens so far; the first one comes from reading the prompt
        while True:
            steps.append(head.circuit.greedy(head(hidden[end - 2 : end - 1]), text[:, end - 1 : end])[0, 1:])
            if end >= len(prompt) + LENGTH:
                break
            accepted = int((steps[-1] == text[0, end : end + WINDOW - 1]).long().cumprod(0).sum())
            end, total = end + accepted + 1, total + accepted
        found.append(Prediction(text[0, len(prompt) :].tolist(), [drafts.tolist() for drafts in steps], total))
    return found


def check(place: Path, reply: Reply) -> list[Prediction]:
    """Text and the number of accepted drafts are the predicted ones."""
    wanted = predict(place)
    assert [answer for (answer,) in reply.tokens] == [one.answer[:LENGTH] for one in wanted]
    accepted, steps = sum(one.accepted for one in wanted), sum(len(one.drafts) - 1 for one in wanted)
    assert 0 < accepted < steps * (WINDOW - 1)  # drafts were accepted and rejected
    assert reply.accepted == accepted
    return wanted


@pytest.mark.parametrize(
    ("family", "head"), [*EVERY_RUN, *(pytest.param(*case, marks=pytest.mark.slow) for case in NIGHTLY)]
)
def test_drafts_and_text_equal_the_head_on_transformers(place: Any, on_v1: Any, family: str, head: str) -> None:
    (reply,) = on_v1((family, head) in NIGHTLY)[family, head]
    wanted = check(place(family, head), reply)
    drafts = [drafts for (drafts,), _ in reply.recorded]
    assert drafts == [one for made in wanted for one in made.drafts]
    if head == "shared":  # x_1 and all drafts, every component: one call of the lm_head, however many they are
        assert all(shapes == [(1, WINDOW, COMPONENTS, 64)] for _, shapes in reply.recorded)


def test_lm_head_without_soft_cap_is_found(place: Any) -> None:
    """The fault the test above has to find: an lm_head without the cap drafts something else."""
    made = place("gemma2", "shared")
    assert [one.drafts for one in predict(made, is_capped=False)] != [one.drafts for one in predict(made)]


def test_capped_and_tied_target_on_v2_accepts_predicted_drafts(place: Any) -> None:
    made = place("gemma2", "shared")
    (reply,) = run({"shared": engine(made, "drafts by kernel")}, "v2")["shared"]
    first = check(made, reply)[0].drafts[:-1]
    assert [tokens.tolist()[0] for tokens, _ in reply.recorded][: len(first)] == first


@pytest.mark.parametrize("head", [pytest.param("shared", marks=pytest.mark.slow), "low rank"])
@pytest.mark.feature("tensor parallel", "exact", "mtpc on V1")
def test_head_on_two_ranks_accepts_predicted_drafts(place: Any, head: str) -> None:
    """Each rank has the logits of its part of the lm_head: the second one of none."""
    divided = {"tensor_parallel_size": 2, "worker_extension_cls": "tests.support.workers.Divides"}
    (reply,) = run({"two": engine(place("llama", head), **divided)}, "v1", **TWO_RANKS)["two"]
    check(place("llama", head), reply)


@pytest.mark.slow
@pytest.mark.parametrize("lm_head", [False, True])
def test_quantised_target_keeps_its_text(place: Any, lm_head: bool, tmp_path: Path) -> None:
    """int8 layers with an lm_head left out, and an int8 lm_head, through vLLM's own: the output is the target's."""
    source = place("qwen2", "shared")
    quantise(source / "target", tmp_path / "target", lm_head=lm_head)
    (tmp_path / "head").symlink_to(source / "head")
    (ours,), (plain,) = run_with_plain(engine(tmp_path, "note drafts"), "v1")
    assert ours.tokens == plain.tokens
    assert ours.accepted > 0
