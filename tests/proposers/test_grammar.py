"""Drafts of structured requests: grammars that follow a request, masks, forbidden drafts."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tests.support import draft_cases, forks
from tests.support.speculators import Setting, batch, made_heads, speculator
from vllm_mtpc.proposers.patches.patch import derived
from vllm_mtpc.proposers.patches.scheduler import HeadScheduler
from vllm_mtpc.proposers.v1.proposer import set_one_hot
from vllm_mtpc.proposers.v2.verification import Verifier
from vllm_mtpc.proposers.worker import grammar_masks as module
from vllm_mtpc.proposers.worker.grammar_masks import Follower, Grammars, Masks, StructuredRequests

VOCAB, REQUESTS, DRAFTS = 40, 5, 3
OUTPUT = [10, 11, 12, 13, 14, 15]  # a Counting that has read them allows tokens from 6 on
STRUCTURED, UNREAD = (0, 2, 3), 3  # rows; the prompt of 3 is not read to its end


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

    def rollback(self, count: int) -> None:
        del self.read[len(self.read) - count :]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        allowed = [token for token in range(VOCAB) if token >= len(self.read)]
        words = [sum(1 << token % 32 for token in allowed if token // 32 == word) for word in range(2)]
        bitmask[row] = torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)


def test_drafts_end_with_their_grammar() -> None:
    """Drafts after a grammar's last token are pruned, whatever they are."""
    grammars = ended, ending, going = Counting(), Counting(), Counting()
    ended.accept_tokens("r", [9])
    step = Masks(torch.zeros(4, 2, dtype=torch.int32), {row: Follower(grammar) for row, grammar in enumerate(grammars)})
    step.lengths[0] = 0
    tokens = iter([[1, 1, 1], [2, 9, 2], [3, 3, 3]])
    pick = step.around(lambda log_q, k: torch.tensor(next(tokens)))
    for k in range(3):
        pick(torch.zeros(3, VOCAB), k)
    assert step.lengths == {0: 0, 1: 2}
    step.rewind()
    assert (ended.read, ending.read, going.read) == ([9], [], [])


def test_mask_forbids_tokens_without_bits_and_leaves_other_rows() -> None:
    grammar, log_q = Counting(), torch.randn(2, 100).log_softmax(dim=-1)  # a grammar has bits for 64 tokens
    grammar.accept_tokens("r", [0, 1, 2])
    step, picked = Masks(torch.zeros(4, 2, dtype=torch.int32), {1: Follower(grammar)}), []
    step.around(lambda masked, k: picked.append(masked) or masked.argmax(dim=-1))(log_q, 0)
    assert torch.equal(picked[0][0], log_q[0])
    assert picked[0][1].isfinite().nonzero()[:, 0].tolist() == list(range(3, VOCAB))
    assert picked[0][1].exp().sum().item() == pytest.approx(1)


def test_masks_follow_drafts_until_none_is_missing() -> None:
    """Rows 0 and 1: a grammar; 2: none; 3: ended. Tokens from the number of the position on are allowed, 9 ends."""
    rows = {0: Follower(Counting()), 1: Follower(Counting()), 3: Follower(Counting())}
    for row, follower in rows.items():
        follower.grammar.accept_tokens("r", [9 if row == 3 else 5])
    step = Masks(torch.zeros(4, 2, dtype=torch.int32), rows)

    def allowed(bits: Tensor) -> list[list[int]]:
        """The first allowed token, by row and draft."""
        found = draft_cases.bits(bits, 100)
        assert (found[..., VOCAB:].all(-1) == found[..., 0]).all(), "tokens without bits are allowed in unmasked rows"
        return found.int().argmax(-1).tolist()

    other = [[0, 0, 0, 0]] * 2
    found = step.follow([[5, 0, 7, 7], [5, 6, 7, 8], *other], 100)
    assert allowed(found) == [[1, 2, 0, 0], [1, 2, 3, 4], *other]
    found = step.follow([[5, 6, 7, 1], [4, 9, 0, 0], *other], 100)  # the first draft of row 1 is another
    assert allowed(found) == [[1, 2, 3, 4], [1, 2, 0, 0], *other]
    assert step.follow([[5, 6, 7, 8], [4, 9, 0, 0], *other], 100) is None
    assert rows[0].grammar.read == [5, 5, 6, 7, 8] and rows[1].grammar.read == [5, 4, 9]
    step.rewind()
    assert [follower.grammar.read for follower in rows.values()] == [[5], [5], [9]]


def compiling(made: Grammars, compiled: Any = Counting) -> list[Any]:
    """Let these grammars compile to what `compiled` returns, at once; the list of the compilations."""
    made.bitmask = torch.zeros(8, 2, dtype=torch.int32)
    every: list[Any] = []

    def submit(call: Any, name: str, params: Any, asked: Any) -> None:
        every.append(asked)
        asked.grammar = compiled()

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


def test_followers_live_as_long_as_their_requests() -> None:
    requests = {"a": state([4]), "b": state([7], structured=False), "c": state([])}
    made, compiled = grammars(requests)
    step = made.masks(requests, ["a", "b", "c"], [[4], [7], []])  # c: an unfinished prompt
    assert set(step.rows) == {0} and not step.unmasked and len(compiled) == 2
    requests["a"].output_token_ids = [4, 5, 9]
    step = made.masks(requests, ["b", "a"], [[7], [5, 9]])
    assert step.rows[1].grammar.read == [4, 5, 9] and step.lengths == {1: 0} and len(compiled) == 2
    requests["a"].output_token_ids = [4]  # restarted
    assert made.masks(requests, ["a"], [[4]]).rows[0].grammar.read == [4] and len(compiled) == 3
    requests["a"].output_token_ids = [4, 5, 0]  # the third must be at least 2: refused, so the masking ends
    assert made.masks(requests, ["a"], [[5, 0]]).unmasked == [0]
    del requests["a"], requests["c"]
    made.masks(requests, ["b"], [[7]])
    assert not made.followers


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
    verifier, probabilities = object.__new__(Verifier), torch.zeros(1, 2, 3)
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
    assert verifier(None, step, probabilities, None).nonzero()[:, 0].tolist() == [6, 8, 9, 10]


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


def states(outputs: dict[str, list[int]], slots: dict[str, int], num_slots: int, prompt_len: int = 2) -> Any:
    """vLLM's RequestState of requests with these outputs."""
    tokens, lengths = torch.zeros(num_slots, 32, dtype=torch.int32), torch.zeros(num_slots, dtype=torch.int32)
    for name, output in outputs.items():
        lengths[slots[name]] = prompt_len + len(output)
        tokens[slots[name], prompt_len : prompt_len + len(output)] = torch.tensor(output, dtype=torch.int32)
    return SimpleNamespace(
        req_id_to_index=slots, all_token_ids=SimpleNamespace(gpu=tokens), total_len=SimpleNamespace(gpu=lengths)
    )


def new(name: str, output: list[int], structured: bool = True) -> Any:
    return state(output, structured, req_id=name, prompt_len=2, prefill_token_ids=[0, 0, *output])


def followed(kept: Any, compiled: Any = Counting) -> Any:
    """The structured requests of a worker, with grammars that `compiled` returns."""
    made = StructuredRequests(config(), kept)
    compiling(made.grammars, compiled)
    return made


def steps(place: Path, at_once: int) -> dict[str, Any]:
    """In a fork: a step without grammars and one with, and tokens that vLLM samples from the scored conditionals."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    with speculator(Setting(place, 6, logits_bytes=at_once)) as made:
        given = batch(made, REQUESTS)
        names = given["input_batch"].req_ids = [f"r{row}" for row in range(REQUESTS)]
        given["num_sampled"][UNREAD] = 0
        slots = given["input_batch"].idx_mapping.tolist()

        def step() -> dict[str, Any]:
            made.draft_logits.zero_()
            made.propose(**given, num_speculative_tokens=DRAFTS)
            log_q = made.draft_logits[slots, :DRAFTS].clone()
            confidences = made.draft_token_confidence_probs[:REQUESTS, :DRAFTS].clone()
            return {"drafts": made.draft_tokens[:REQUESTS, :DRAFTS].clone(), "log_q": log_q, "confidences": confidences}

        free = step()
        outputs = {names[row]: OUTPUT if row != UNREAD else [] for row in STRUCTURED}
        kept = states(outputs, dict(zip(names, slots, strict=True)), 6)
        requests = [new(names[row], []) for row in STRUCTURED]
        made.structured = followed(kept, Future)
        made.structured.add(requests)
        pending = step()
        with mock.patch.object(made, "_sample") as drawn:
            made._warm_up()
        made.structured = followed(kept)
        made.structured.add(requests)
        with mock.patch.object(made.model, "draft_params", wraps=made.model.draft_params) as calls:
            masked = step()
        waits, tolist = [], torch.Tensor.tolist
        with (
            mock.patch.object(made, "_sample", wraps=made._sample) as draws,
            mock.patch.object(torch.Tensor, "tolist", lambda tensor: waits.append(tensor.dim()) or tolist(tensor)),
        ):
            step()  # after the first one has read all outputs
        rows = (given["input_batch"].idx_mapping, given["temperature"], given["seeds"])
        again = [
            gumbel_sample(log_q.contiguous(), *rows, pos, apply_temperature=True, is_drafting=True)
            for k in range(DRAFTS)
            for log_q, pos in [(masked["log_q"][:, k], given["input_batch"].positions + 1 + k)]
        ]
        followers = made.structured.grammars.followers.values()
        read = [follower.grammar.read for follower in followers if follower.grammar is not None]
        return {
            "free": free,
            "pending": pending,
            "warmed up": sum(len(call.args) == 6 for call in drawn.call_args_list),  # with a mask
            "masked": masked,
            "waits": waits.count(2),  # of the device; states of grammars are on the host
            "masked draws": sum(len(call.args) == 6 for call in draws.call_args_list),
            "again": torch.stack(again, 1),
            "read": read,
            "temperature": given["temperature"][slots],
            "chunks": [len(call.args[0]) for call in calls.call_args_list],
        }


@pytest.fixture(scope="module", params=[1 << 30, 1], ids=["one chunk", "chunks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = made_heads(tmp_path_factory.mktemp("masked"), VOCAB, {"head": {"window": DRAFTS + 1}})["head"]
    return forks.call("v2", "tests.proposers.test_grammar:steps", place, request.param)


def test_rows_without_a_grammar_are_unchanged(found: dict[str, Any]) -> None:
    others = [row for row in range(REQUESTS) if row not in STRUCTURED]
    for name, part in found["masked"].items():
        assert torch.equal(part[others], found["free"][name][others])
    chunks = found["chunks"]
    assert chunks in ([REQUESTS, len(STRUCTURED)], [1] * (REQUESTS + 2)), chunks  # without the unread prompt's


def test_grammar_that_is_not_compiled_masks_nothing(found: dict[str, Any]) -> None:
    """Masked drafts are warmed up all the same: while requests are served `--jit-monitor-mode error` forbids it."""
    assert found["warmed up"] > 0
    for name, part in found["pending"].items():
        assert torch.equal(part, found["free"][name])


def test_host_waits_once_before_masked_drafts_and_once_after_each(found: dict[str, Any]) -> None:
    chunks = 1 if found["chunks"][0] == REQUESTS else len(STRUCTURED)
    assert found["waits"] == chunks + found["masked draws"]
    masked = chunks if chunks == 1 else chunks - 1  # the unread prompt's has none
    assert masked <= found["masked draws"] <= masked * (1 + DRAFTS)


def test_masked_drafts_are_sampled_from_the_scored_conditionals(found: dict[str, Any]) -> None:
    """Vocabulary of 40, tokens from 6 on allowed, then from 7 on, then from 8."""
    rows = [row for row in STRUCTURED if row != UNREAD]
    log_q, drafts = found["masked"]["log_q"][rows], found["masked"]["drafts"][rows]
    for k in range(DRAFTS):
        first = len(OUTPUT) + k
        assert (log_q[1:, k, :first] == -torch.inf).all() and (log_q[1:, k, first:] > -torch.inf).all()
        assert (drafts[:, k] >= first).all()
    drawn = found["temperature"][rows] > 0
    assert drawn.tolist() == [False, True], "one is greedy"
    assert torch.equal(drafts[drawn], found["again"][rows][drawn])
    shift = (log_q - found["free"]["log_q"][rows])[drawn, 0, len(OUTPUT) :]
    torch.testing.assert_close(shift, torch.zeros_like(shift))
    assert not torch.equal(found["masked"]["confidences"][rows], found["free"]["confidences"][rows])
    assert found["read"] == [OUTPUT] * 2, "grammars are rewound; one for each request whose prompt is read"


def test_host_reads_new_tokens_once() -> None:
    """Also of steps without drafts; a preempted request starts again with the output that it has kept."""
    slots = {"a": 1, "b": 0, "free": 2}
    kept = states({"a": [4, 5], "b": [7]}, slots, 4)
    made = followed(kept)
    made.add([new("a", []), new("b", []), new("free", [], structured=False)])
    line = SimpleNamespace(req_ids=["free", "b", "a"])
    assert made.rows(line) == [1, 2]
    where, sampled = torch.tensor([0, 1]), torch.tensor([1, 1], dtype=torch.int32)
    drafts = torch.tensor([[3], [2]])  # the last two tokens are read with them, more apart

    def read() -> list[list[int]]:
        masks, read_drafts = made.masks(["b", "a"], where, sampled, drafts)
        assert read_drafts == drafts.tolist()
        return [masks.rows[row].grammar.read for row in range(2)]

    assert read() == [[7], [4, 5]]
    vars(kept).update(vars(states({"a": [4, 5, 6, 7, 8], "b": [7, 8]}, slots, 4)))
    assert read() == [[7, 8], [4, 5, 6, 7, 8]]
    assert read() == [[7, 8], [4, 5, 6, 7, 8]]  # nothing new
    del slots["b"]
    made.add([new("a", [4, 9])])  # preempted, and its last step thrown away
    assert set(made.requests) == {"a"}
    vars(kept).update(vars(states({"a": [4, 9, 10]}, slots, 4)))
    assert made.masks(["a"], where[1:], sampled[1:], drafts[1:])[0].rows[0].grammar.read == [4, 9, 10]
    assert made.rows(SimpleNamespace(req_ids=["free"])) == []
