"""Drafts of structured requests: grammars that follow a request, masks, forbidden drafts."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.grammars import VOCAB, Counting
from vllm_mtpc.proposers.heads import grammar_masks as module
from vllm_mtpc.proposers.heads.grammar_masks import Follower, Grammars, Masks
from vllm_mtpc.proposers.v1.proposer import set_one_hot


def masks(**grammars: Counting) -> Masks:
    rows = {int(name[1:]): Follower(grammar) for name, grammar in grammars.items()}
    return Masks(torch.zeros(4, 2, dtype=torch.int32), rows)


def argmax(log_q: Tensor, k: int) -> Tensor:
    return log_q.argmax(-1)


def test_conditionals_are_masked_and_the_grammar_is_rolled_back() -> None:
    grammar, seen = Counting(), list[Tensor]()
    grammar.accept_tokens("r", [5, 6])
    step = masks(r1=grammar)
    pick = step.around(lambda log_q, k: (seen.append(log_q.clone()), argmax(log_q, k))[1])
    log_q = torch.linspace(0, -8, VOCAB).repeat(3, 1).log_softmax(-1)  # the smallest token is the likeliest
    drafts = torch.stack([pick(log_q.clone(), k) for k in range(3)], 1)
    assert drafts[1].tolist() == [2, 3, 4]  # the smallest allowed
    assert drafts[0].tolist() == drafts[2].tolist() == [0, 0, 0]  # rows without a grammar
    assert all((log_q.exp()[1, : 2 + k] == 0).all() for k, log_q in enumerate(seen))
    torch.testing.assert_close(torch.stack(seen).exp().sum(-1), torch.ones(3, 3))
    step.rewind()
    assert grammar.read == [5, 6]
    assert masks().around(argmax) is argmax  # a batch without grammars


def test_drafts_end_with_their_grammar() -> None:
    """Drafts after a grammar's last token are pruned, whatever they are."""
    ended, ending, going = Counting(), Counting(), Counting()
    ended.accept_tokens("r", [9])
    step = masks(r0=ended, r1=ending, r2=going)
    step.lengths[0] = 0
    tokens = iter([[1, 1, 1], [2, 9, 2], [3, 3, 3]])
    pick = step.around(lambda log_q, k: torch.tensor(next(tokens)))
    for k in range(3):
        pick(torch.zeros(3, VOCAB), k)
    assert step.lengths == {0: 0, 1: 2}
    step.rewind()
    assert (ended.read, ending.read, going.read) == ([9], [], [])


def test_refused_token_ends_the_masking() -> None:
    follower = Follower(Counting())
    follower.read("r", [3, 4])
    assert follower.grammar is not None and follower.num_read == 2
    follower.read("r", [3, 4, 0])  # the third must be at least 2
    assert follower.grammar is None


def grammars(is_masking: bool = True, **given: Any) -> tuple[Grammars, list[Any]]:
    """Return Grammars that compile to Counting at once, and a list of the compilations."""
    reasoning = SimpleNamespace(**{"reasoning_parser": "", "enable_in_reasoning": False, **given})
    sizes = SimpleNamespace(max_num_seqs=4)
    made = Grammars(SimpleNamespace(scheduler_config=sizes, structured_outputs_config=reasoning), is_masking)
    made.bitmask = torch.zeros(4, 2, dtype=torch.int32)
    compiled: list[Any] = []

    def submit(compile_one: Any, name: str, params: Any, asked: Any) -> None:
        compiled.append(asked)
        asked.grammar = Counting()

    made.starter.submit = submit
    return made, compiled


def state(output: list[int], structured: bool = True) -> Any:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+") if structured else None)
    return SimpleNamespace(sampling_params=params, output_token_ids=output)


def test_followers_live_as_long_as_their_requests() -> None:
    made, compiled = grammars()
    requests = {"a": state([4]), "b": state([7], structured=False), "c": state([])}
    for name, one in requests.items():
        made.start(name, one.sampling_params)
    step = made.masks(requests, ["a", "b", "c"], [[4], [7], []])  # c: an unfinished prompt
    assert set(step.rows) == {0} and not step.unmasked and len(compiled) == 2
    requests["a"].output_token_ids = [4, 5, 9]
    step = made.masks(requests, ["b", "a"], [[7], [5, 9]])
    assert step.rows[1].grammar.read == [4, 5, 9] and step.lengths == {1: 0} and len(compiled) == 2
    requests["a"].output_token_ids = [4]  # restarted
    assert made.masks(requests, ["a"], [[4]]).rows[0].grammar.read == [4] and len(compiled) == 3
    del requests["a"], requests["c"]
    made.masks(requests, ["b"], [[7]])
    assert not made.followers


def test_unmasked_drafts_have_probability_one() -> None:
    made, compiled = grammars(is_masking=False)
    made.start("a", state([4]).sampling_params)
    step = made.masks({"a": state([4])}, ["a"], [[4]])
    assert step.unmasked == [0] and not step.rows and not compiled
    probs = torch.full((2, VOCAB), 1 / VOCAB)
    set_one_hot(probs, step.unmasked, torch.tensor([7, 8]))
    assert probs[0].argmax() == 7 and probs[0].sum() == probs[0].max() == 1
    assert (probs[1] == 1 / VOCAB).all()


@pytest.mark.parametrize(("is_enabled", "unmasked"), [(False, [0]), (True, [])])
def test_drafts_are_unmasked_if_a_reasoning_parser_starts_the_grammar(is_enabled: bool, unmasked: list[int]) -> None:
    made, _ = grammars(reasoning_parser="qwen3", enable_in_reasoning=is_enabled)
    made.start("a", state([4]).sampling_params)
    assert made.masks({"a": state([4])}, ["a"], [[4]]).unmasked == unmasked


def test_drafts_are_unmasked_until_a_grammar_is_compiled() -> None:
    """No step waits for one; the whole output is read once it is compiled. One that fails is dropped."""
    made, compiled = grammars()
    requests = {"a": state([4]), "b": state([7])}
    for name, one in requests.items():
        made.start(name, one.sampling_params)
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


def test_grammar_masks_once_every_rank_has_compiled_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with different drafts would verify different texts."""
    other_ranks = iter([[0], [1]])
    group = SimpleNamespace(world_size=2, cpu_group=None)
    monkeypatch.setattr(module, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(module, "get_tp_group", lambda: group)

    def all_reduce(own: Tensor, op: Any, group: Any) -> None:
        own.copy_(torch.minimum(own, torch.tensor(next(other_ranks))))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    made, requests = grammars()[0], {"a": state([4])}
    made.start("a", requests["a"].sampling_params)
    assert [bool(made.masks(requests, ["a"], [[4]]).rows) for _ in range(3)] == [False, True, True], "asked twice only"


def test_drafts_are_unmasked_if_the_backend_fails(caplog: pytest.LogCaptureFixture) -> None:
    made, compiled = grammars()
    made.start("a", state([]).sampling_params)
    made.manager = SimpleNamespace(grammar_init=lambda request: 1 / 0)
    made._compile("a", state([]).sampling_params, compiled[0])
    assert made.masks({"a": state([4])}, ["a"], [[4]]).unmasked == [0]


def test_v2_verifies_the_first_forbidden_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from vllm_mtpc.proposers.v2.verification import Verifier

    verifier, probabilities = object.__new__(Verifier), torch.zeros(1, 2, 3)
    monkeypatch.setattr(RejectionSampler, "__call__", lambda self, logits, batch, draft_logits, invalid: invalid)
    #                      a request's rows: its token, then its drafts
    invalid = torch.tensor([False, False, True, True, False, True, False, False, True, True, True])
    expected = torch.tensor([False, False, False, True, False, False, False, False, False, True, True])
    assert torch.equal(verifier(None, None, probabilities, invalid), expected)
    assert verifier(None, None, None, invalid) is invalid, "argmax drafts have no residual distribution"
    assert verifier(None, None, probabilities, None) is None


def test_scheduler_keeps_the_first_forbidden_draft_on_v2() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_mtpc.proposers.patches.patch import derived
    from vllm_mtpc.proposers.patches.scheduler import HeadScheduler

    class Silent(Scheduler):
        def update_draft_token_ids(self, draft_token_ids: Any) -> None: ...

    def request(**more: Any) -> Any:
        given = {"use_structured_output": True, "is_prefill_chunk": False, "spec_token_ids": [1, 2]} | more
        return SimpleNamespace(is_finished=lambda: False, **given)

    def run(verifies_forbidden: bool) -> dict[str, list[int]]:
        requests = {
            "pruned": request(),
            "whole": request(spec_token_ids=[1, 2, 3]),
            "free": request(use_structured_output=False),
            "prompt": request(is_prefill_chunk=True, spec_token_ids=[]),
        }
        scheduler = object.__new__(derived(HeadScheduler, Silent))
        scheduler.requests, scheduler.verifies_forbidden = requests, verifies_forbidden
        scheduler.update_draft_token_ids(SimpleNamespace(req_ids=[*requests, "gone"], draft_token_ids=[[1, 2, 3]] * 5))
        return {name: one.spec_token_ids for name, one in requests.items()}

    untouched = {"pruned": [1, 2], "whole": [1, 2, 3], "free": [1, 2], "prompt": []}
    assert run(True) == untouched | {"pruned": [1, 2, -1]}
    assert run(False) == untouched


@pytest.mark.feature("drafts masked with the grammar", "refused", "ptp on V2", why="not an option of ptp")
def test_masks_of_ptp_are_refused() -> None:
    from vllm_mtpc.errors import ServeConfigError
    from vllm_mtpc.proposers.config.ptp_options import PtpSpeculativeConfig

    given = {"method": "ptp", "model": "x", "mask_drafts": True}
    with pytest.raises(ServeConfigError, match="'mask_drafts' is not an option of method 'ptp'"):
        PtpSpeculativeConfig.create(**given, target_model_config=None, target_parallel_config=None)
