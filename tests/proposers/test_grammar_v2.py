"""Masked drafts on Model Runner V2 without an engine: their rows, their distribution, and the text the host reads."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.support import forks
from tests.support.configs import write_head
from tests.support.grammars import VOCAB, Counting
from tests.support.models import make_target
from tests.support.speculators import Setting, batch, speculator

REQUESTS, DRAFTS = 5, 3
OUTPUT = [10, 11, 12, 13, 14, 15]  # a Counting that has read them allows tokens from 6 on
STRUCTURED, UNREAD = (0, 2, 3), 3  # rows; the prompt of 3 is not read to its end


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
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+") if structured else None)
    return SimpleNamespace(req_id=name, sampling_params=params, prompt_len=2, prefill_token_ids=[0, 0, *output])


def followed(kept: Any, compiled: Any = Counting) -> Any:
    """The structured requests of a worker, with grammars that `compiled` returns."""
    from vllm_mtpc.proposers.v2.structured_requests import StructuredRequests

    given = SimpleNamespace(reasoning_parser="", enable_in_reasoning=False)
    sizes = SimpleNamespace(max_num_seqs=8)
    made = StructuredRequests(SimpleNamespace(scheduler_config=sizes, structured_outputs_config=given), kept)
    made.grammars.bitmask = torch.zeros(8, 2, dtype=torch.int32)
    made.grammars.starter.submit = lambda call, name, params, asked: setattr(asked, "grammar", compiled())
    return made


def steps(place: Path, at_once: int) -> dict[str, Any]:
    """In a fork: a step without grammars and one with, and tokens that vLLM samples from the scored conditionals."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from vllm_mtpc.proposers.v2 import speculator as module

    small = mock.patch.object(module, "SMALL_LEAVES", at_once)
    with small, speculator(Setting(place, 6, logits_bytes=at_once)) as made:
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
        with mock.patch.object(made, "_sample_sequential") as by_definition:
            made._warm_up()
        made.structured = followed(kept)
        made.structured.add(requests)
        with mock.patch.object(made.model, "draft_params", wraps=made.model.draft_params) as calls:
            masked = step()
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
            "warmed up": by_definition.call_count,
            "masked": masked,
            "again": torch.stack(again, 1),
            "read": read,
            "temperature": given["temperature"][slots],
            "chunks": [len(call.args[0]) for call in calls.call_args_list],
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    target = make_target(folder / "target", vocab_size=VOCAB, seed=0).config.to_dict()
    write_head(folder / "head", target, window=DRAFTS + 1)
    return folder


@pytest.fixture(scope="module", params=[1 << 30, 1], ids=["one chunk", "chunks"])
def found(request: pytest.FixtureRequest, place: Path) -> dict[str, Any]:
    return forks.call("v2", "tests.proposers.test_grammar_v2:steps", place, request.param)


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
    torch.testing.assert_close(shift, shift[:, :1].expand_as(shift))
    torch.testing.assert_close(log_q[drawn].exp().sum(-1), torch.ones(1, DRAFTS))
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

    def read() -> list[list[int]]:
        masks = made.masks(["b", "a"], where, sampled)
        return [masks.rows[row].grammar.read for row in range(2)]

    assert read() == [[7], [4, 5]]
    vars(kept).update(vars(states({"a": [4, 5, 6, 7, 8], "b": [7, 8]}, slots, 4)))
    assert read() == [[7, 8], [4, 5, 6, 7, 8]]
    assert read() == [[7, 8], [4, 5, 6, 7, 8]]  # nothing new
    del slots["b"]
    made.add([new("a", [4, 9])])  # preempted, and its last step thrown away
    assert set(made.requests) == {"a"}
    vars(kept).update(vars(states({"a": [4, 9, 10]}, slots, 4)))
    assert made.masks(["a"], where[1:], sampled[1:]).rows[0].grammar.read == [4, 9, 10]
    assert made.rows(SimpleNamespace(req_ids=["free"])) == []
