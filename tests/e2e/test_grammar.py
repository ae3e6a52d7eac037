"""Structured requests: allowed drafts, the text of plain vLLM and its distribution.

The distribution is compared with enumeration, with faults that must be found.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support import forks
from tests.support.distribution_cases import asking, draws_of, is_distributed
from tests.support.engine import DEMO, Call, Engine, Reply, ask, build, run, run_with_plain
from tests.support.models import make_head, make_target
from tests.support.requests import ALL_DRAFTS, EOS, SCHEMA

START = "import os\n\n\ndef walk(path):\n    "
WORD = {"type": "string"}
TAGS = {"type": "array", "items": {**WORD, "maxLength": 6}, "maxItems": 3}
FIELDS = {"mode": {"enum": ["read", "write", "append"]}, "count": {"type": "integer", "minimum": 0, "maximum": 999}}
RECORD = {**SCHEMA, "properties": {**FIELDS, "tags": TAGS}, "required": ["mode", "count", "tags"]}
LINE = r"(GET|POST) /[a-z]{1,8}(/[a-z]{1,8})? HTTP/1\.[01]"
CHOICES = ["import os, sys", "import json, os", "return None, None"]
GRAMMARS = (
    {"json": SCHEMA},
    {"json": RECORD},
    {"regex": LINE},
    {"choice": CHOICES},
    {"grammar": 'root ::= "f(" arg (", " arg)* ")"\narg ::= [a-z]{1,6} "=" [0-9]{1,3}'},
)


def calls() -> dict[str, Call]:
    """Next to structured requests one without a grammar, the first."""
    asked = [{"max_tokens": 16}, *({"max_tokens": 64, "structured_outputs": grammar} for grammar in GRAMMARS)]
    prompts = [list(START.encode())] * len(asked)
    greedy = [{"temperature": 0.0, **one} for one in asked]
    drawn = [{"temperature": 1.0, "seed": seed, **one} for seed, one in enumerate(asked, start=-1)]
    del drawn[0]["seed"]
    return {"greedy": Call(prompts, greedy), "drawn": Call(prompts, drawn)}


def engine(injected: str | None = None, head: str | None = "btree", **spec: object) -> Engine:
    arguments = {
        "max_model_len": 256,
        "max_num_seqs": 12,  # all at once: interpreted, a step takes as long for few
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    return build(DEMO, head, list(calls().values()), injected, {**ALL_DRAFTS, **spec}, **arguments)


@pytest.fixture(scope="module", params=["v1", "v2"])
def outputs(request: pytest.FixtureRequest) -> dict[str, dict[str, Reply]]:
    off = engine("noted drafts", mask_drafts=False)
    engines = {"plain": engine(head=None), "masked": engine("noted drafts"), "off": off}
    if request.param == "v1":  # which drafts the argmax where it does not mask
        engines |= {"unmasked": engine("grammars never compiled")}
    replies = run(engines, request.param)
    return {name: dict(zip(calls(), reply, strict=True)) for name, reply in replies.items()}


def test_greedy_and_seeded_text_is_plain_vllms(outputs: dict[str, dict[str, Reply]]) -> None:
    for name, replies in outputs.items():
        for call, first in (("greedy", 0), ("drawn", 1)):  # the first one drawn has no seed
            assert replies[call].tokens[first:] == outputs["plain"][call].tokens[first:], (name, call)
            assert replies[call].finish[first:] == outputs["plain"][call].finish[first:], (name, call)


def test_masked_drafts_are_allowed_by_the_grammar(outputs: dict[str, dict[str, Reply]]) -> None:
    drafts = [noted for reply in outputs["masked"].values() for noted in reply.recorded]
    assert sum(len(drafted) for drafted, _ in drafts) > 300
    assert all(drafted == valid or valid[-1:] == [EOS] for drafted, valid in drafts)  # V2 drafts past the end
    unmasked = [noted for reply in outputs["off"].values() for noted in reply.recorded]
    assert any(drafted != valid and valid[-1:] != [EOS] for drafted, valid in unmasked), (
        "the test sees forbidden drafts where there are any"
    )


SLOW = pytest.mark.slow
ENDS = [list(start.encode()) for start in (START, "x = ", "for a in b")]
SHORT = {"regex": "a?b?c?"}
NONE = {"structured_outputs": {"regex": "abc"}, "allowed_token_ids": [ord("z")]}  # no token is allowed


def engine_of(backend: str) -> Engine:
    asked = [ask(ENDS, 8, structured_outputs=SHORT), ask(ENDS, 8, structured_outputs=SHORT, temperature=1.0, seed=3)]
    asked.append(ask(ENDS[:1], 8, ignore_eos=False, **NONE))
    options = {"max_model_len": 128, "structured_outputs_config": {"backend": backend}}
    return build(DEMO, "btree", asked, "grammars waited for", ALL_DRAFTS, **options)


@pytest.mark.parametrize(
    ("runner", "backend"),
    [
        pytest.param(runner, backend, marks=[SLOW] * (backend != quick))
        for runner, quick in (("v1", "xgrammar"), ("v2", "guidance"))
        for backend in ("xgrammar", "guidance", "outlines")
    ],
)
def test_text_after_the_end_of_a_grammar_is_that_without_drafts(runner: str, backend: str) -> None:
    ours, plain = run_with_plain(engine_of(backend), runner)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.tokens == theirs.tokens and mine.finish == theirs.finish
    assert all(len(tokens) == 8 for reply in ours[:2] for (tokens,) in reply.tokens)
    assert ours[1].accepted > 5
    assert ours[2].finish == [["error"]]


LETTERS = "abcdef"
VOCAB, END = 7, 6
LENGTH, PROMPT = 4, [0, 3]
TEXTS = "(a[bc]|b[acd]|[de]a)[aef][abd]"  # allowed texts; most texts of the target are forbidden
TAIL = "[a-f]{8}"  # longer than any answer, so that no answer reaches the grammar's end
DRAWS = 20_000 if forks.ON_GPU else 2_000  # the smallest of the injected biases is 0.13; 2,000 draws allow 0.1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("grammar")
    target = make_target(folder / "target", VOCAB, seed=1, hidden_size=32)
    vocabulary = {**{letter: i for i, letter in enumerate(LETTERS)}, "<eos>": END}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / "target")
    make_head(folder / "btree", target, "btree", 4, 3, steps=40)
    return folder, target


@torch.no_grad()
def distribution_under_grammar(model: LlamaForCausalLM) -> np.ndarray:
    """Probabilities [V ** LENGTH] of all answers: the target's, renormalised over the allowed tokens."""
    texts = itertools.product(range(6), repeat=LENGTH)
    words = {text for text in texts if re.fullmatch(TEXTS, "".join(LETTERS[token] for token in text))}
    distribution = np.zeros((VOCAB,) * LENGTH)
    for word in words:
        probs = model(torch.tensor([[*PROMPT, *word]])).logits[0, len(PROMPT) - 1 : -1].double().softmax(-1)
        allowed = [list({other[k] for other in words if other[:k] == word[:k]}) for k in range(LENGTH)]
        chances = [probs[k, word[k]] / probs[k, allowed[k]].sum() for k in range(LENGTH)]
        distribution[word] = torch.stack(chances).prod()
    assert abs(distribution.sum() - 1) < 1e-9
    return distribution.ravel()


FAULTS = ("masked drafts scored unmasked", "unmasked drafts", "masked drafts scored unmasked on V2")


@pytest.mark.parametrize(
    ("runner", "injected"),
    [
        pytest.param("v1", ("grammars waited for", FAULTS[0]), id="v1, masked drafts"),
        pytest.param("v1", (None, FAULTS[1]), marks=SLOW, id="v1, unmasked drafts"),
        pytest.param("v2 at once", ("grammars waited for", FAULTS[2]), id="v2, masked drafts"),
        pytest.param("v2 at once", (None,), marks=SLOW, id="v2, unmasked drafts"),
    ],
)
def test_distribution_under_a_grammar(
    tiny: tuple[Path, LlamaForCausalLM], runner: str, injected: tuple[str | None, ...]
) -> None:
    """Faults that must be found: drafts without masks, and masked drafts that are scored by unmasked conditionals."""
    folder, target = tiny
    distribution = distribution_under_grammar(target)
    sampling = {"temperature": 1.0, "max_tokens": LENGTH, "structured_outputs": {"regex": TEXTS + TAIL}}
    calls, engines = [asking(PROMPT, {**sampling, "detokenize": False}, DRAWS)], {}
    for name in injected:  # None: drafts are not masked
        spec = {**ALL_DRAFTS, "mask_drafts": name is not None}
        engines[name] = build(folder, "btree", calls, name, spec, max_model_len=64, max_num_seqs=256)
    for name, (reply,) in run(engines, runner).items():
        assert is_distributed(draws_of(reply), distribution, VOCAB) == (name not in FAULTS), name
        assert reply.accepted > DRAWS / 10 or name in FAULTS
