"""Drafts masked on Model Runner V2, without an engine: of which rows, from what distribution, and what the host
reads."""

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
GREEDY, STRUCTURED, UNREAD = 0, (0, 2, 3), 3  # rows; of 3 the prompt is not read to its end


def states(outputs: dict[str, list[int]], slots: dict[str, int], num_slots: int, prompt_len: int = 2) -> Any:
    """What vLLM's RequestState has of requests with so much output."""
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
    """The structured requests of a worker, of Counting grammars, or of what else `compiled` makes."""
    from vllm_mtpc.proposers.v2.grammar import StructuredRequests

    given = SimpleNamespace(reasoning_parser="", enable_in_reasoning=False)
    sizes = SimpleNamespace(max_num_seqs=8)
    made = StructuredRequests(SimpleNamespace(scheduler_config=sizes, structured_outputs_config=given), kept)
    made.grammars.bitmask = torch.zeros(8, 2, dtype=torch.int32)
    made.grammars.starter.submit = lambda call, name, params, asked: setattr(asked, "grammar", compiled())
    return made


def steps(place: Path, at_once: int) -> dict[str, Any]:
    """In a fork: a step without grammars and one with, and the tokens that vLLM draws from what is to be scored."""
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
        kept, requests = (
            states(outputs, dict(zip(names, slots, strict=True)), 6),
            [new(names[r], []) for r in STRUCTURED],
        )
        made.structured = followed(kept, Future)
        made.structured.add(requests)
        pending = step()
        with mock.patch.object(made, "_draft_by_definition") as by_definition:
            made._warm_up()
        made.structured = followed(kept)
        made.structured.add(requests)
        with mock.patch.object(made.model, "draft_params", wraps=made.model.draft_params) as calls:
            masked = step()
        again = [
            gumbel_sample(
                masked["log_q"][:, k].contiguous(),
                given["input_batch"].idx_mapping,
                given["temperature"],
                given["seeds"],
                given["input_batch"].positions + 1 + k,
                apply_temperature=True,
                is_drafting=True,
            )
            for k in range(DRAFTS)
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
            "goes": [len(call.args[0]) for call in calls.call_args_list],
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    target = make_target(folder / "target", vocab_size=VOCAB, seed=0).config.to_dict()
    write_head(folder / "head", target, window=DRAFTS + 1)
    return folder


@pytest.fixture(scope="module", params=[1 << 30, 1], ids=["at once", "in goes"])
def found(request: pytest.FixtureRequest, place: Path) -> dict[str, Any]:
    return forks.call("v2", "tests.proposers.test_grammar_v2:steps", place, request.param)


def test_rows_without_a_grammar_are_drafted_as_ever(found: dict[str, Any]) -> None:
    others = [row for row in range(REQUESTS) if row not in STRUCTURED]
    for name, part in found["masked"].items():
        assert torch.equal(part[others], found["free"][name][others])
    goes = found["goes"]
    assert goes in ([REQUESTS, len(STRUCTURED)], [1] * (REQUESTS + 2)), goes  # that of the unread prompt is left out


def test_a_grammar_that_is_never_compiled_stops_no_step(found: dict[str, Any]) -> None:
    for name, part in found["pending"].items():
        assert torch.equal(part, found["free"][name])


def test_what_drafts_under_a_grammar_runs_before_the_first_request(found: dict[str, Any]) -> None:
    """It compiles vLLM's noise once more; while requests are served `--jit-monitor-mode error` allows none."""
    assert found["warmed up"] > 0


def test_drafts_are_allowed_and_scored_by_the_distribution_they_are_drawn_from(found: dict[str, Any]) -> None:
    """Vocabulary of 40, tokens from 6 on allowed, then from 7 on, then from 8."""
    rows = [row for row in STRUCTURED if row != UNREAD]
    log_q, drafts = found["masked"]["log_q"][rows], found["masked"]["drafts"][rows]
    for k in range(DRAFTS):
        least = len(OUTPUT) + k
        assert (log_q[1:, k, :least] == -torch.inf).all() and (log_q[1:, k, least:] > -torch.inf).all()
        assert (drafts[:, k] >= least).all()
    drawn = found["temperature"][rows] > 0
    assert drawn.tolist() == [False, True], "one is greedy, and has no distribution"
    assert torch.equal(drafts[drawn], found["again"][rows][drawn]), (
        "the noise of the launch, on the distribution that is scored"
    )
    shift = (log_q - found["free"]["log_q"][rows])[drawn, 0, len(OUTPUT) :]  # x_1 is the same: so is what follows it
    torch.testing.assert_close(shift, shift[:, :1].expand_as(shift))
    torch.testing.assert_close(log_q[drawn].exp().sum(-1), torch.ones(1, DRAFTS))
    assert not torch.equal(found["masked"]["confidences"][rows], found["free"]["confidences"][rows])


def test_grammars_are_where_the_text_is_after_a_step(found: dict[str, Any]) -> None:
    assert found["read"] == [OUTPUT] * 2, "one for each request whose prompt is read"


def test_the_host_reads_what_it_has_not_read() -> None:
    """Also of steps that drafted nothing; a request that was preempted is begun again with what it has kept."""
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
