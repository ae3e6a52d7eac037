"""PTP heads in vLLM: whatever is drafted, the text is that of the u-coupled sampler without drafts.

All engines run Model Runner V2 in Triton's interpreter, float32. Heads have random adapters where acceptance does not
matter; the oracle drafts the right text up to a random place, so that every number of accepted drafts occurs.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine import Call, Engine, Reply, ask, build, run
from tests.support.models import make_ptp_head, make_target
from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.checkpoint.ptp_head import load_student
from vllm_mtpc.heads.ptp.row_groups import plan_groups
from vllm_mtpc.hf import load_target
from vllm_mtpc.kernels.uniform import uniform

VOCAB, WINDOW, LONGEST, SEED = 48, 7, 96, 11
PROMPTS = [[3, 9, 4], [7, 7, 1, 12, 5, 2, 30, 41], [8], [20, 21, 22, 23, 24]]
SHARED = [5, 6, 7, 8] * 10  # long enough for blocks to be found again in the prefix cache
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
PENALISED = {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5}
SMALL = {"max_model_len": LONGEST, "max_num_seqs": 4, "block_size": 32}


def draw(prompts: list[list[int]], max_tokens: int, **sampling: Any) -> Call:
    """Prompt n has the seed SEED + n."""
    call = ask(prompts, max_tokens, **sampling)
    return Call(prompts, [{**one, "seed": SEED + n} for n, one in enumerate(call.sampling)])


CALLS = {
    "greedy": ask(PROMPTS, 16),
    "sampled": draw(PROMPTS, 24, **SAMPLED),
    "penalised": draw(PROMPTS[:2], 12, **PENALISED),
    "to the end": draw([list(range(40)), [1] * 60], LONGEST, **SAMPLED),
    "prefix hits": draw([[*SHARED, 9], [*SHARED, 9], [*SHARED, 2, 3]], 24, **SAMPLED),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ptp")
    target = make_target(folder / "target", VOCAB, seed=3)
    for variant in ("o-ptp", "c-ptp"):
        make_ptp_head(folder / variant, target, variant, WINDOW)
    make_ptp_head(folder / "late", target, "late", WINDOW, late_width=12, distribution_trust=0.8)
    make_ptp_head(folder / "loud", target, "o-ptp", WINDOW, scale=0.5)
    return folder


def engine(
    folder: Path, calls: list[Call], head: str | None = None, injected: str | None = None, **spec: Any
) -> Engine:
    arguments = dict(SMALL)
    if spec.pop("few_blocks", False):  # for one and a half of the longest requests
        reserved = plan_groups(read_config(folder / head), [3] * SMALL["max_num_seqs"], False, 16)
        arguments["num_gpu_blocks_override"] = reserved.num_blocks(SMALL["block_size"]) + 5
    return build(folder, head, calls, injected, {"method": "ptp", "draft_pass": "merged", **spec}, **arguments)


DRAFTS = "num_speculative_tokens"
TWO_PASS = {DRAFTS: 3, "draft_pass": "two-pass"}
EVERY_RUN: dict[str, dict[str, Any]] = {
    "oracle": {"head": "o-ptp", DRAFTS: 4, "injected": "oracle"},  # drafts the text of the engine before it
    "two passes replayed": {"head": "o-ptp", **TWO_PASS, "injected": "replayed"},
    "merged late": {"head": "late", DRAFTS: 3},
    # adapters that would turn every token if they acted on the target's rows
    "few blocks": {"head": "loud", DRAFTS: 3, "max_aux_rows": 16, "few_blocks": True},
}
NIGHTLY: dict[str, dict[str, Any]] = {
    "merged 1": {"head": "o-ptp", DRAFTS: 1},
    "merged 3": {"head": "o-ptp", DRAFTS: 3, "max_aux_rows": 24},
    "merged 6": {"head": "o-ptp", DRAFTS: 6},
    "merged c-ptp": {"head": "c-ptp", DRAFTS: 3},
    "two passes 3": {"head": "o-ptp", **TWO_PASS},
    "two passes c-ptp": {"head": "c-ptp", DRAFTS: 6, "draft_pass": "two-pass"},
}


def replies_of(folder: Path, drafted: dict[str, dict[str, Any]]) -> dict[str, dict[str, Reply]]:
    """Replies by engine and call: plain vLLM, its sampler with u without drafts, and engines that draft."""
    calls, engines = list(CALLS.values()), {"plain": engine(folder, [CALLS["greedy"]])}
    engines["undrafted"] = engine(folder, calls, injected="coupled_without_drafts")
    engines |= {name: engine(folder, calls, **how) for name, how in drafted.items()}
    return {name: dict(zip(CALLS, reply, strict=False)) for name, reply in run(engines, "v2").items()}


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, dict[str, Reply]]:
    return replies_of(folder, EVERY_RUN)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("drafted", [EVERY_RUN, pytest.param(NIGHTLY, marks=SLOW)], ids=["every run", "nightly"])
def test_text_is_that_without_drafts(folder: Path, drafted: dict[str, Any], request: pytest.FixtureRequest) -> None:
    outputs = request.getfixturevalue("outputs") if drafted is EVERY_RUN else replies_of(folder, NIGHTLY)
    assert outputs["undrafted"]["greedy"].tokens == outputs["plain"]["greedy"].tokens
    for name, call in itertools.product(drafted, CALLS):
        assert outputs[name][call].tokens == outputs["undrafted"][call].tokens, (name, call)


def test_every_number_of_drafts_is_accepted_and_requests_are_preempted(outputs) -> None:
    """The oracle's coin makes each of 0 .. K frequent: P(none of about 25 steps accepts all of 4) < 1 %, seed fixed."""
    reply = outputs["oracle"]["to the end"]
    counts = [reply.steps, *reply.metrics["per_position"]]
    assert all(earlier > later > 0 for earlier, later in itertools.pairwise(counts))
    assert outputs["few blocks"]["to the end"].metrics["vllm:num_preemptions"] > 0
    assert all(outputs[name]["prefix hits"].metrics["vllm:prefix_cache_hits"] > 0 for name in EVERY_RUN)


def test_replayed_pass_drafts_the_same_and_its_first_draft_is_exact(outputs) -> None:
    """Token for token, in batches of 1 to 4 that are padded to 2 and 4.

    x_2 comes from the target's own distribution with the verifier's own u: accepted, but where the text ends.
    """
    replies = outputs["two passes replayed"]
    for call, reply in replies.items():
        assert len(reply.recorded) > 5 and all(step == {"replayed": 1, "same": True} for step in reply.recorded), call
    reply = replies["sampled"]
    assert reply.metrics["per_position"][0] >= reply.steps - 4 * 3  # at most one step per request and call ends within


OTHERS = pytest.param([("o-ptp", "merged"), ("c-ptp", "two-pass")], marks=SLOW)


@pytest.mark.parametrize("cases", [[("o-ptp", "two-pass"), ("c-ptp", "merged")], OTHERS], ids=["some", "others"])
def test_states_of_groups_equal_the_student(folder: Path, cases: list[tuple[str, str]]) -> None:
    """States of groups equal [prefix | u ..] read by the student on transformers, one sequence at a time.

    Other kernels, the same numbers in float32: the largest difference allowed is 2e-4 of the states' size. Rows that
    carry 0.5 in the place of u differ by more.
    """
    call, zero = draw(PROMPTS[:2], 24, **SAMPLED), torch.zeros(1, dtype=torch.long)
    engines = {
        head: engine(folder, [call], head, "record_groups", draft_pass=draft_pass, **{DRAFTS: 3})
        for head, draft_pass in cases
    }
    for head, (reply,) in run(engines, "v2", async_scheduling=False).items():
        student = load_student(folder / head, load_target(folder / "target", torch.float32))
        assert len(reply.recorded) > 10
        for note in reply.recorded:
            number, prefix, hidden = int(note["request"].partition("-")[0]), note["prefix"], note["hidden"]
            text = torch.tensor([PROMPTS[number] + reply.tokens[number][0]])
            if prefix > text.shape[1]:
                continue  # the last step went beyond what was asked for
            keys = torch.arange(len(hidden)) + prefix - 1
            u = uniform(torch.full_like(keys, SEED + number), keys)[None]
            expected = student.aux(student.prefix(text[:, :prefix], None), zero, zero + prefix - 1, u)[0]
            assert (hidden - expected).abs().max() < 2e-4 * expected.abs().max()
