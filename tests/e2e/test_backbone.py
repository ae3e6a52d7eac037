"""Heads with a backbone in vLLM: the drafts are those of the head's definition, and the text is the target's.

All engines run Model Runner V2 in Triton's interpreter, float32, asynchronously scheduled. Prompts are read in pieces,
found in the prefix cache, and read again after preemption; drafts are accepted and rejected. What a draft depends on
next to its own text would make it another one than that of the definition, which reads the whole text at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import backbones, forks
from tests.support.engine import TWO_RANKS, Call, Engine, Reply, run
from tests.support.models import make_target
from tests.support.pieces import LONGEST, PROMPTS, SHARED, SMALL, VOCAB, ask

WINDOW = 4
FEW = 6  # blocks, the one that vLLM keeps for itself among them


CALLS = [
    ask(PROMPTS, 12),
    ask([[*SHARED, 9]], 6),
    ask([[*SHARED, 9], [*SHARED, 4]], 6),  # after the call before: found in the cache
    ask([[*range(40), *range(16)], [1] * 32], 24),  # more than there are blocks: preempted
    ask([[2] * 84], 12),  # to the model's length, which queries go beyond
]
ALONE = CALLS[1:2]  # a prompt whose first pieces are read in steps that sample nothing
HEADS: dict[str, dict[str, Any]] = {
    "hmm": {"token_rank": 4},
    "from anchor": {"circuit": "ff", "num_components": 1, "component_rank": 0, "sample_from_anchor": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and heads fitted to the beginnings of its answers."""
    folder = tmp_path_factory.mktemp("backbone")
    make_target(folder / "target", VOCAB, seed=3, layers=5)
    reader = backbones.Target(folder / "target", [])
    texts = [prompt + reader.greedy(prompt, 6) for call in CALLS for prompt in call.prompts]
    for name, settings in HEADS.items():
        # not the target's own key and value heads: pages of another size; what enters its first layer, leaves its last
        given = {"backbone_kv_heads": 1, "aux_hidden_state_layer_ids": [0, 2, 5]} | settings
        backbones.fit(folder / name, folder / "target", texts, WINDOW, **given)
    return folder


def engine(folder: Path, head: str, injected: str | None = None, calls: list[Call] = CALLS, **spec: Any) -> Engine:
    given = {"method": "mtpc", "model": str(folder / head), "num_speculative_tokens_per_batch_size": "off", **spec}
    options = {"num_gpu_blocks_override": FEW, "speculative_config": given}
    return Engine(str(folder / "target"), calls, SMALL | options, injected)


def replies(engines: dict[str, Engine], **more: Any) -> dict[str, list[Reply]]:
    outputs = run(engines, "v2", async_scheduling=True, **more)
    return outputs


@pytest.fixture(scope="module")
def outputs(place: Path) -> dict[str, list[Reply]]:
    engines = {
        "hmm": engine(place, "hmm", "backbone"),
        "context one on": engine(place, "hmm", "backbone context one on", ALONE),
        "from anchor": engine(place, "from anchor", "backbone", CALLS[1:2], num_speculative_tokens=2),
    }
    if not forks.ON_GPU:
        engines["in graphs"] = engine(place, "hmm", "backbone in graphs", CALLS[:1])
    return replies(engines)


def check_text(folder: Path, calls: list[Call], replies: list[Reply]) -> None:
    """Every token of the answers is the target's likeliest one."""
    target = backbones.Target(folder / "target", [])
    for call, reply in zip(calls, replies, strict=True):
        for prompt, (answer,), one in zip(call.prompts, reply.tokens, call.sampling, strict=True):
            assert len(answer) == one["max_tokens"]
            assert target.best(prompt + answer)[len(prompt) - 1 : -1] == answer


def check(folder: Path, head: str, calls: list[Call], replies: list[Reply]) -> int:
    """Compare what was noted with the definition's states and greedy drafts; returns how many drafts were."""
    reference = backbones.Reference(folder / head, folder / "target")
    pairs = [(call.prompts, reply.tokens) for call, reply in zip(calls, replies, strict=True)]
    texts = [prompt + answer[0] for some in pairs for prompt, answer in zip(*some, strict=True)]
    notes = [note for reply in replies for note in reply.recorded if "drafts" in note]
    compared = 0
    for request, text in enumerate(texts):
        # the last step went beyond what was asked for
        mine = [note for note in notes if note["request"] == request and note["prefix"] < len(text)]
        prefix = torch.tensor([note["prefix"] for note in mine])
        read, drafts = reference.drafts(reference.target.aux(text), prefix, torch.tensor(text)[prefix])
        for note, states, own in zip(mine, read, drafts, strict=True):
            if note["prefix"] + len(states) > LONGEST:
                continue  # queries past the model's length are padding
            # other kernels, the same numbers in float32
            assert (note["hidden"] - states).abs().max() < 2e-4 * states.abs().max(), (request, note["prefix"])
            assert torch.equal(note["drafts"], own[: len(note["drafts"])]), (request, note["prefix"])
            compared += 1
    return compared


def counts(replies: list[Reply]) -> tuple[int, int]:
    """Accepted drafts, and all."""
    metrics = replies[-1].metrics
    return metrics["vllm:spec_decode_num_accepted_tokens"], metrics["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.column("mtpc on V2")
@pytest.mark.feature("prefix caching", "exact")
@pytest.mark.feature("chunked prefill", "exact")
@pytest.mark.feature("preemption by recompute", "exact")
@pytest.mark.feature("asynchronous scheduling", "exact")
@pytest.mark.feature("max_model_len reached", "exact")
def test_drafts_equal_the_definition_and_text_the_target(place: Path, outputs: dict[str, list[Reply]]) -> None:
    check_text(place, CALLS, outputs["hmm"])
    assert check(place, "hmm", CALLS, outputs["hmm"]) > 60
    accepted, drafted = counts(outputs["hmm"])
    assert 0.15 < accepted / drafted < 0.95  # acceptances and rejections alike; untrained 1 of 48
    metrics = outputs["hmm"][-1].metrics
    assert metrics["vllm:prefix_cache_hits"] > 0 and metrics["vllm:num_preemptions"] > 0


def test_drafts_from_anchor_equal_the_definition(place: Path, outputs: dict[str, list[Reply]]) -> None:
    """With fewer drafts than the window holds there are as many queries."""
    check_text(place, CALLS[1:2], outputs["from anchor"])
    assert check(place, "from anchor", CALLS[1:2], outputs["from anchor"]) > 4


@pytest.mark.skipif(forks.ON_GPU, reason="on a GPU the other tests draft in graphs")
def test_drafts_from_graphs_equal_the_definition(place: Path, outputs: dict[str, list[Reply]]) -> None:
    (reply,) = outputs["in graphs"]
    check_text(place, CALLS[:1], [reply])
    assert check(place, "hmm", CALLS[:1], [reply]) > 20
    assert sum(note.get("replayed", 0) for note in reply.recorded) > 10


def found(folder: Path, outputs: dict[str, list[Reply]], fault: str) -> None:
    """Text is the target's whatever is drafted: only the comparison of drafts can tell."""
    check_text(folder, ALONE, outputs[fault])
    with pytest.raises(AssertionError):
        check(folder, "hmm", ALONE, outputs[fault])


def test_shifted_context_is_found(place: Path, outputs: dict[str, list[Reply]]) -> None:
    found(place, outputs, "context one on")


@pytest.mark.slow
def test_missing_chunks_and_causal_queries_are_found(place: Path) -> None:
    faults = ("unread chunks", "causal")
    more = replies({fault: engine(place, "hmm", f"backbone {fault}", ALONE) for fault in faults})
    for fault in faults:
        found(place, more, fault)


@pytest.mark.slow
def test_tensor_parallel_accepts_as_many_drafts(place: Path, outputs: dict[str, list[Reply]]) -> None:
    """Workers are processes of their own, where nothing is noted: as many drafts are accepted as on one rank."""
    one = engine(place, "hmm")
    two = replace(one, arguments=one.arguments | {"tensor_parallel_size": 2})
    reply = replies({"two": two}, **TWO_RANKS)["two"]
    assert [each.tokens for each in reply] == [each.tokens for each in outputs["hmm"]]
    # sums in another order may turn a near tie
    assert counts(reply)[0] == pytest.approx(counts(outputs["hmm"])[0], rel=0.1)
