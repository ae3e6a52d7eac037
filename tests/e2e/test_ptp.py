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
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.kernels.uniform import uniform
from vllm_mtpc.plan.row_groups import merged_plan

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
    make_ptp_head(folder / "idle", target, "o-ptp", WINDOW, scale=0.0)
    make_ptp_head(folder / "loud", target, "o-ptp", WINDOW, scale=0.5)
    return folder


def engine(
    folder: Path, calls: list[Call], head: str | None = None, injected: str | None = None, **spec: Any
) -> Engine:
    arguments = dict(SMALL)
    if spec.pop("few_blocks", False):  # for one and a half of the longest requests
        reserved = merged_plan(PtpConfig.read(folder / head / "config.json"), 3, SMALL["max_num_seqs"], 16)
        arguments["num_gpu_blocks_override"] = reserved.num_blocks(SMALL["block_size"]) + 5
    return build(folder, head, calls, injected, {"method": "ptp", "draft_pass": "merged", **spec}, **arguments)


DRAFTS = "num_speculative_tokens"
TWO_PASS = {DRAFTS: 3, "draft_pass": "two-pass"}
EVERY_RUN: dict[str, dict[str, Any]] = {
    "oracle": {"head": "o-ptp", DRAFTS: 4, "injected": "oracle"},  # drafts the text of the engine before it
    "merged 3": {"head": "o-ptp", DRAFTS: 3, "max_aux_rows": 24},
    "two passes replayed": {"head": "o-ptp", **TWO_PASS, "injected": "replayed"},
    "merged late": {"head": "late", DRAFTS: 3},
    "few blocks": {"head": "o-ptp", DRAFTS: 3, "max_aux_rows": 16, "few_blocks": True},
}
NIGHTLY: dict[str, dict[str, Any]] = {
    "merged 1": {"head": "o-ptp", DRAFTS: 1},
    "merged 6": {"head": "o-ptp", DRAFTS: 6},
    "merged c-ptp": {"head": "c-ptp", DRAFTS: 3},
    "two passes 3": {"head": "o-ptp", **TWO_PASS},
    "two passes c-ptp": {"head": "c-ptp", DRAFTS: 6, "draft_pass": "two-pass"},
}


def replies_of(folder: Path, drafted: dict[str, dict[str, Any]]) -> dict[str, dict[str, Reply]]:
    """Replies by engine and call: plain vLLM, its sampler with u without drafts, and engines that draft."""
    calls = list(CALLS.values())
    engines = {
        "plain": engine(folder, [CALLS["greedy"]]),
        "undrafted": engine(folder, calls, injected="coupled_without_drafts"),
        **{name: engine(folder, calls, **how) for name, how in drafted.items()},
    }
    return {name: dict(zip(CALLS, reply, strict=False)) for name, reply in run(engines, "v2").items()}


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, dict[str, Reply]]:
    return replies_of(folder, EVERY_RUN)


@pytest.fixture(scope="module")
def nightly(folder: Path) -> dict[str, dict[str, Reply]]:
    return replies_of(folder, NIGHTLY)


FEATURES = ["top_k", "top_p", "seed: the same text in any batch", "preemption by recompute", "prefix caching", "eager"]
FEATURES += ["asynchronous scheduling", "max_model_len reached"]
EXACT = [pytest.mark.feature(row, "exact", "ptp on V2") for row in FEATURES]


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=EXACT) for name in EVERY_RUN),
        *(pytest.param(name, marks=[*EXACT, pytest.mark.slow]) for name in NIGHTLY),
    ],
)
def test_text_is_that_without_drafts(name: str, request: pytest.FixtureRequest) -> None:
    outputs = request.getfixturevalue("nightly" if name in NIGHTLY else "outputs")
    for call in CALLS:
        assert outputs[name][call].tokens == outputs["undrafted"][call].tokens, call


def test_greedy_text_is_plain_vllms(outputs) -> None:
    assert outputs["undrafted"]["greedy"].tokens == outputs["plain"]["greedy"].tokens


def test_every_number_of_drafts_is_accepted(outputs) -> None:
    """The oracle's coin makes each of 0 .. K frequent: P(none of about 25 steps accepts all of 4) < 1 %, seed fixed."""
    reply = outputs["oracle"]["to the end"]
    per_position = reply.metrics["per_position"]
    assert all(earlier > later > 0 for earlier, later in itertools.pairwise(per_position))
    assert per_position[0] < reply.steps


@pytest.mark.parametrize("call", CALLS)
def test_replayed_pass_drafts_the_same(outputs, call: str) -> None:
    """Token for token, in batches of 1 to 4 that are padded to 2 and 4."""
    steps = outputs["two passes replayed"][call].recorded
    assert len(steps) > 5 and all(step == {"replayed": 1, "same": True} for step in steps)


def test_first_draft_of_two_passes_is_exact(outputs) -> None:
    """x_2 comes from the target's own distribution with the verifier's own u: accepted, but where the text ends."""
    reply = outputs["two passes replayed"]["sampled"]
    assert reply.metrics["per_position"][0] >= reply.steps - 4 * 3  # at most one step per request and call ends within


@pytest.mark.column("ptp on V2")
@pytest.mark.feature("preemption by recompute", "exact")
@pytest.mark.feature("prefix caching", "exact")
def test_requests_are_preempted_and_found_in_the_cache(outputs) -> None:
    assert outputs["few blocks"]["to the end"].metrics["vllm:num_preemptions"] > 0
    assert outputs["merged 3"]["prefix hits"].metrics["vllm:prefix_cache_hits"] > 0


def record(folder: Path, call: Call, injected: str, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Reply]:
    """Replies by head and draft pass."""
    engines = {
        " ".join(case): engine(folder, [call], case[0], injected, draft_pass=case[1], **{DRAFTS: 3}) for case in cases
    }
    replies = run(engines, "v2", async_scheduling=False)
    return {case: replies[" ".join(case)][0] for case in cases}


@pytest.mark.parametrize(
    "cases",
    [
        [("o-ptp", "two-pass"), ("c-ptp", "merged")],
        pytest.param([("o-ptp", "merged"), ("c-ptp", "two-pass")], marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
def test_states_of_groups_equal_the_student(folder: Path, cases: list[tuple[str, str]]) -> None:
    """States of groups equal [prefix | u ..] read by the student on transformers, one sequence at a time.

    Other kernels, the same numbers in float32: the largest difference allowed is 2e-4 of the states' size. Rows that
    carry 0.5 in the place of u differ by more.
    """
    for case, reply in record(folder, draw(PROMPTS[:2], 24, **SAMPLED), "record_groups", cases).items():
        check_groups(folder, case[0], reply)


def check_groups(folder: Path, head: str, reply: Reply) -> None:
    from vllm_mtpc.checkpoint.ptp_head import load_student
    from vllm_mtpc.hf import load_target

    student = load_student(folder / head, load_target(folder / "target", torch.float32))
    assert len(reply.recorded) > 10
    for note in reply.recorded:
        number = int(note["request"].partition("-")[0])
        text = torch.tensor(PROMPTS[number] + reply.tokens[number][0])
        prefix, hidden = note["prefix"], note["hidden"]
        if prefix > len(text):
            continue  # the last step went beyond what was asked for
        keys = torch.arange(len(hidden)) + prefix - 1
        u = uniform(torch.full_like(keys, SEED + number), keys)
        read = student.prefix(text[None, :prefix], None)
        zero = torch.zeros(1, dtype=torch.long)
        expected = student.aux(read, zero, zero + prefix - 1, u[None])[0]
        assert (hidden - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.slow  # in every run test_text_is_that_without_drafts serves a late network
def test_served_drafts_equal_the_evaluator(folder: Path) -> None:
    """What is served is what the evaluator reads from the student.

    Without the late network it is not, nor with another trust, nor (c-ptp) as another variant.
    """
    cases = list(itertools.product(("late", "c-ptp"), ("merged", "two-pass")))
    for case, reply in record(folder, draw(PROMPTS[:2], 8, **SAMPLED), "record_drafts", cases).items():
        check_drafts(folder, *case, reply)


def check_drafts(folder: Path, head: str, draft_pass: str, reply: Reply) -> None:
    from vllm_mtpc.checkpoint.ptp_head import load_student
    from vllm_mtpc.eval.ptp_acceptance import draft, draft_rows
    from vllm_mtpc.hf import load_target

    student = load_student(folder / head, load_target(folder / "target", torch.float32))
    config, late = student.config, student.late
    if late is None:
        others = ((None, config.model_copy(update={"variant": "independent"})),)
    else:
        others = ((None, config), (late, config.model_copy(update={"distribution_trust": 0.2})))
    same, steps = [0] * len(others), 0
    for note in reply.recorded:
        number, known = int(note["request"].partition("-")[0]), note["known"]
        text = torch.tensor(PROMPTS[number] + reply.tokens[number][0])
        if known > len(text):
            continue  # the last step went beyond what was asked for
        first = int(draft_pass == "two-pass")  # there x_1 is read, and the first draft is exact
        rows = draft_rows(student, 3 - first)
        start = known - 2 + first  # of the window: the last token it sees
        keys = torch.arange(start, start + rows.stop + 1)  # u of the tokens after it
        u = uniform(torch.full_like(keys, SEED + number), keys)[None]
        read, zero = student.prefix(text[None, : start + 1]), torch.zeros(1, dtype=torch.long)
        found = []
        for student.late, student.config in ((late, config), *others):
            hidden = student.aux(read, zero, zero + start, u[:, : rows.stop])[:, rows]
            number = u[:, 1 : 1 + hidden.shape[1]]
            found.append(draft(student, hidden, number, False, text[None, start + 1])[0].tolist())
        served = note["drafts"][first:3]
        assert served[: len(found[0])] == found[0]
        same, steps = [count + (other == found[0]) for count, other in zip(same, found[1:], strict=True)], steps + 1
    assert steps >= 6 and max(same) < steps


def test_target_rows_do_not_depend_on_the_adapters(folder: Path) -> None:
    """Bit for bit: the adapters act on auxiliary rows alone."""
    call, cases = draw(PROMPTS[1:2], 2, **SAMPLED), [("idle", "merged"), ("loud", "merged")]
    idle, loud = (reply.recorded for reply in record(folder, call, "record_real_rows", cases).values())
    assert len(idle) > 0
    assert torch.equal(idle[0], loud[0])  # the pass that reads the prompt: the same tokens, other adapters
