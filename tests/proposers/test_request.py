"""Drafts of a request: how many it may ask for, how many are kept while it may not end yet, and where thinking ends."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_mtpc.proposers.options import request_options as request
from vllm_mtpc.proposers.v1.model_runner_v1 import DraftedThinkingBudget

VOCAB, STOP, MIN = 4, 2, 3
MARKERS = [([0], [1]), ([0], [1, 2]), ([0, 3], [1, 2, 3])]  # token ids where thinking starts and ends


@pytest.mark.parametrize(
    ("given", "drafts"),
    [
        ({}, 7),
        ({"extra_args": {}}, 7),
        ({"extra_args": {"mtpc_drafts": 3}}, 3),
        ({"extra_args": {"mtpc_drafts": 0}}, 0),
        ({"min_p": 0.1}, 0),  # vLLM verifies no drafts with these two
        ({"logit_bias": {5: 1.0}}, 0),
    ],
)
def test_drafts_of_a_request(given: dict[str, Any], drafts: int) -> None:
    request.check_request(SamplingParams(**given), 7)
    assert request.max_drafts(SamplingParams(**given), 7) == drafts
    assert request.max_drafts(None, 7) == 7  # a pooling request


@pytest.mark.parametrize(
    "given",
    [{"extra_args": {"mtpc_drafts": 1}}, {"min_p": 0.1}, {"logit_bias": {5: 1.0}}, {"logprob_token_ids": [1]}],
)
def test_an_operator_refuses_requests_with_drafts_of_their_own(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request.check_request(SamplingParams(**given), 7)
    monkeypatch.setenv("MTPC_REQUEST_DRAFTS", "0")
    with pytest.raises(VLLMValidationError, match=r"MTPC_REQUEST_DRAFTS=0.*remove it"):
        request.check_request(SamplingParams(**given), 7)
    request.check_request(SamplingParams(temperature=0.5, logprobs=3), 7)


def test_seeds_beyond_64_bits_are_refused() -> None:
    """Sample i of n has seed + i; a number that is too large ends Model Runner V2."""
    request.check_request(SamplingParams(seed=2**63 - 2, n=2), 7)
    with pytest.raises(VLLMValidationError, match=rf"n=2.*allowed are seeds up to {2**63 - 2}; lower the seed"):
        request.check_request(SamplingParams(seed=2**63 - 1, n=2), 7)


@pytest.mark.parametrize("value", [-1, 8, 2.5, "3", True, [1]])
def test_bad_numbers_are_refused(value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=r"mtpc_drafts=.*allowed are whole numbers from 0 .* to 7") as caught:
        request.check_request(SamplingParams(extra_args={"mtpc_drafts": value}), 7)
    assert "\n" not in str(caught.value)


def test_a_misspelt_name_is_refused_and_others_are_not_ours() -> None:
    with pytest.raises(VLLMValidationError, match=r"'mtpc_draft' is not known; allowed: 'mtpc_drafts'; remove it"):
        request.check_request(SamplingParams(extra_args={"mtpc_draft": 1}), 7)
    request.check_request(SamplingParams(extra_args={"session_id": "a"}), 7)


def think(kind: type[ThinkingBudgetStateHolder], seed: int, drafts: int) -> list[list[int]]:
    """Greedy texts of three requests, two with a budget, whose next token is a hash of the text.

    drafts: most of a request and step; many are right. With them requests leave the batch and return. 0: plain vLLM.
    """
    rng, device = Random(seed), torch.device("cpu")
    start, end = MARKERS[seed % 3]
    holder = kind(
        SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end), 3, drafts, device, False
    )
    texts: list[list[int]] = [[], [], []]
    requests = [{"output_token_ids": text} for text in texts]

    def add(row: int) -> None:
        params, prompt = SamplingParams(thinking_token_budget=(seed + row) % 5), start if row == 1 else []
        holder.sync_batch(BatchUpdate(3, removed=[row], added=[(row, params, prompt, texts[row])], moved=[]))

    def logits(places: list[tuple[int, list[int]]]) -> torch.Tensor:
        drawn = [Random(f"{seed} {row} {text[-2:]} {len(text)}").random() for row, text in places]
        return torch.nn.functional.one_hot(torch.tensor(drawn).mul(VOCAB).long(), VOCAB).float()

    def next_token(row: int, text: list[int]) -> int:
        return int(logits([(row, text)]).argmax())

    for row in (1, 2):
        add(row)
    while min(map(len, texts)) < 60:
        if drafts and isinstance(holder, DraftedThinkingBudget):
            if rng.random() < 0.2:
                add(rng.randint(1, 2))
            holder.keep_states(requests)
        made: list[list[int]] = []
        for row, text in enumerate(texts):
            made.append([])
            for _ in range(rng.randint(0, drafts)):
                made[row].append(next_token(row, text + made[row]) if rng.random() < 0.8 else rng.randrange(VOCAB))
        holder.update_state(texts, made)
        last = logits([(row, text + made[row]) for row, text in enumerate(texts)])
        last = holder.apply_to_logits(last, drafts > 0, made).argmax(1).tolist()
        places = [(row, text + made[row][:k]) for row, text in enumerate(texts) for k in range(len(made[row]))]
        verified = holder.apply_to_logits(logits(places), False, made).argmax(1).tolist() if places else []
        for row, text in enumerate(texts):
            tokens, verified = [*verified[: len(made[row])], last[row]], verified[len(made[row]) :]
            kept = next((k for k, token in enumerate(made[row]) if token != tokens[k]), len(made[row]))
            text += tokens[: kept + 1]
    return [text[:60] for text in texts]


def test_thinking_ends_where_it_ends_without_drafts() -> None:
    """vLLM's own holder differs; where it does not, vLLM has fixed it and it can be used."""
    plain = [think(ThinkingBudgetStateHolder, seed, 0) for seed in range(60)]
    assert [think(DraftedThinkingBudget, seed, 3) for seed in range(60)] == plain
    assert [think(ThinkingBudgetStateHolder, seed, 3) for seed in range(60)] != plain
