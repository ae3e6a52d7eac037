"""Drafts of structured requests: grammars that follow a request, and forbidden drafts.

`tests/e2e/test_grammar.py` compares masked drafts with the grammar and the distribution with enumeration.
"""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_mtpc.proposers.patches.scheduler import HeadScheduler
from vllm_mtpc.proposers.v1.proposer import set_one_hot
from vllm_mtpc.proposers.v2.verification import HeadSampler
from vllm_mtpc.proposers.worker import grammar_masks as module
from vllm_mtpc.proposers.worker.derive import derived
from vllm_mtpc.proposers.worker.grammar_masks import Grammars

VOCAB = 40


class Counting:
    """A grammar whose k-th token must be at least k, and which ends with the token 9."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if token < len(self.read) and not self.is_terminated():
                return False
            self.read.append(token)
        return True

    def is_terminated(self) -> bool:
        return 9 in self.read


def compiling(made: Grammars) -> list[Any]:
    """Let these grammars compile to Counting, at once; the list of the compilations."""
    made.bitmask = torch.zeros(8, 2, dtype=torch.int32)
    every: list[Any] = []

    def submit(call: Any, name: str, params: Any, asked: Any) -> None:
        every.append(asked)
        asked.grammar = Counting()

    made.starter.submit = submit
    return every


def config(**given: Any) -> Any:
    """The parts of an engine's configuration that grammars read."""
    reasoning = SimpleNamespace(**{"reasoning_parser": "", "enable_in_reasoning": False, **given})
    return SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8), structured_outputs_config=reasoning)


def grammars(requests: dict[str, Any], is_masking: bool = True, **given: Any) -> tuple[Grammars, list[Any]]:
    """Grammars of these requests, and their compilations."""
    made = Grammars(config(**given), is_masking)
    compiled = compiling(made)
    for name, one in requests.items():
        made.start(name, one.sampling_params)
    return made, compiled


def state(output: list[int], structured: bool = True, **more: Any) -> Any:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+") if structured else None)
    return SimpleNamespace(sampling_params=params, output_token_ids=output, **more)


@pytest.mark.parametrize(
    ("is_masking", "given", "unmasked"),
    [
        (False, {}, [0]),
        (True, {"reasoning_parser": "qwen3"}, [0]),
        (True, {"reasoning_parser": "qwen3", "enable_in_reasoning": True}, []),
    ],
)
def test_drafts_are_unmasked_by_option_and_if_a_reasoning_parser_starts_the_grammar(
    is_masking: bool, given: dict[str, Any], unmasked: list[int]
) -> None:
    requests = {"a": state([4])}
    made, compiled = grammars(requests, is_masking, **given)
    step = made.masks(requests, ["a"], [[4]])
    assert step.unmasked == unmasked and len(step.rows) == len(compiled) == 1 - len(unmasked)


def test_unmasked_drafts_have_probability_one() -> None:
    probs = torch.full((2, VOCAB), 1 / VOCAB)
    set_one_hot(probs, [0], torch.tensor([7, 8]))
    assert probs[0].argmax() == 7 and probs[0].sum() == probs[0].max() == 1
    assert (probs[1] == 1 / VOCAB).all()


def test_drafts_are_unmasked_until_a_grammar_is_compiled() -> None:
    """No step waits for one; the whole output is read once it is compiled. One that fails is dropped."""
    requests = {"a": state([4]), "b": state([7])}
    made, compiled = grammars(requests)
    futures = [Future(), Future()]
    for asked, future in zip(compiled, futures, strict=True):
        asked.grammar = future
    step = made.masks(requests, ["a", "b"], [[4], [7]])
    assert step.unmasked == [0, 1] and not step.rows
    futures[0].set_result(Counting())
    futures[1].set_exception(ValueError("no grammar"))
    requests["a"].output_token_ids = [4, 5]
    step = made.masks(requests, ["a", "b"], [[5], [7]])
    assert step.unmasked == [1] and step.rows[0].grammar.read == [4, 5]
    assert made.masks(requests, ["b"], [[7]]).unmasked == [0] and len(compiled) == 2
    made.manager = SimpleNamespace(grammar_init=lambda request: 1 / 0)  # the backend itself fails
    made.start("b", requests["b"].sampling_params)
    made._compile("b", requests["b"].sampling_params, compiled[2])
    assert made.masks(requests, ["b"], [[7]]).unmasked == [0]


def test_grammar_masks_once_every_rank_has_compiled_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with different drafts would verify different texts."""
    other_ranks = iter([[0], [1]])
    group = SimpleNamespace(world_size=2, cpu_group=None)
    monkeypatch.setattr(module, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(module, "get_tp_group", lambda: group)

    def all_reduce(own: Tensor, op: Any, group: Any) -> None:
        own.copy_(torch.minimum(own, torch.tensor(next(other_ranks))))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    requests = {"a": state([4])}
    made, _ = grammars(requests)
    assert [bool(made.masks(requests, ["a"], [[4]]).rows) for _ in range(3)] == [False, True, True], "asked twice only"


def test_v2_verifies_the_first_forbidden_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it was not asked for: the token at its place is then from the target's distribution."""
    verifier, probabilities = object.__new__(HeadSampler), torch.zeros(1, 2, 3)
    monkeypatch.setattr(RejectionSampler, "__call__", lambda self, logits, batch, draft_logits, invalid: invalid)
    #                      a request's rows: its token, then its drafts
    invalid = torch.tensor([False, False, True, True, False, True, False, False, True, True, True])
    expected = torch.tensor([False, False, False, True, False, False, False, False, False, True, True])
    requests, most, verifier.num_speculative_steps = [4, 3, 4], np.array([3, 3, 3]), 3
    states = SimpleNamespace(most=SimpleNamespace(np=most, gpu=torch.from_numpy(most)))
    verifier.sampler = SimpleNamespace(sampling_states=states)
    rows = (
        torch.arange(3).repeat_interleave(torch.tensor(requests)),
        torch.cat([torch.arange(rows) for rows in requests]),
    )
    names = "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos"
    step = SimpleNamespace(**dict(zip(names, (np.arange(3), *rows), strict=True)))
    assert torch.equal(verifier(None, step, probabilities, invalid), expected)
    assert verifier(None, step, None, invalid) is invalid, "argmax drafts have no residual distribution"
    assert verifier(None, step, probabilities, None) is None
    most[1:] = 1, 0
    expected[[6, 8]] = True
    assert torch.equal(verifier(None, step, probabilities, invalid), expected)


def test_scheduler_keeps_the_first_forbidden_draft_on_v2() -> None:
    class Silent(Scheduler):
        def update_draft_token_ids(self, draft_token_ids: Any) -> None: ...

    fields = {"use_structured_output": True, "is_prefill_chunk": False, "spec_token_ids": [1, 2]}
    kinds: dict[str, dict[str, Any]] = {
        "pruned": {},
        "whole": {"spec_token_ids": [1, 2, 3]},
        "free": {"use_structured_output": False},
        "prompt": {"is_prefill_chunk": True, "spec_token_ids": []},
    }
    drafts = SimpleNamespace(req_ids=[*kinds, "gone"], draft_token_ids=[[1, 2, 3]] * 5)
    for verifies_forbidden, kept in ((True, [1, 2, -1]), (False, [1, 2])):
        scheduler = object.__new__(derived(HeadScheduler, Silent))
        scheduler.verifies_forbidden = verifies_forbidden
        scheduler.requests = {
            name: SimpleNamespace(is_finished=lambda: False, **fields | more) for name, more in kinds.items()
        }
        scheduler.update_draft_token_ids(drafts)
        found = {name: one.spec_token_ids for name, one in scheduler.requests.items()}
        assert found == {"pruned": kept, "whole": [1, 2, 3], "free": [1, 2], "prompt": []}
