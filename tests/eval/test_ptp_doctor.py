"""The doctor on PTP heads: counters are predicted to the step, injected faults are named, a refusal is one line.

Most tests replace the server by the decoding loop, which counts as a two-pass server does; one slow test starts vLLM.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.tiny import llama_target
from tests.support.tiny_ptp import continue_prompt, oracle, random_student
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import save_ptp
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.served import Served
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.eval import doctor, ptp_acceptance
from vllm_mtpc.eval.evaluator import Asked
from vllm_mtpc.eval.metrics import StepMetrics
from vllm_mtpc.eval.ptp_evaluator import PtpComparison, PtpEvaluator
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.hf import load_target

K, TOKENS = 4, 32
PROMPTS = [[5, 6, 7], [1], [2, 9, 9, 9], [11, 3, 1], [4, 4], [8, 10]]
SEEDS = [7, 8, 9, 10, 11, 12]
SAMPLED = Sampling(0.9, 0.95, top_k=10)


def served(
    student: Student, sampling: Sampling, drafts: int = K, seeds: list[int] = SEEDS, tokens: int = TOKENS
) -> Served:
    """Return the answers and counters of a server of ``student``."""
    texts = [
        continue_prompt(student, torch.tensor(prompt), tokens, sampling, seed, drafts)
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    kept = [count for text in texts for count in text.accepted]
    reached = tuple(sum(count >= k for count in kept) for k in range(1, drafts + 1))
    counted = Acceptance(len(kept), drafts * len(kept), sum(kept), reached)
    return Served(sampling.temperature, [text.tokens for text in texts], counted, "float32")


def compare(student: Student, answer: Served, sampling: Sampling) -> tuple[PtpEvaluator, PtpComparison]:
    loaded = PtpEvaluator(Path("head"), student.config, student, student.target)
    return loaded, loaded.compare(Asked(PROMPTS, K, sampling.top_k, sampling.top_p, SEEDS), answer)


@pytest.mark.parametrize("variant", ["o-ptp", "c-ptp"])
@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(0.0)])
def test_counters_are_predicted_to_the_step(variant, sampling):
    student = random_student(llama_target(vocab_size=12), variant)
    answer = served(student, sampling)
    _, comparison = compare(student, answer, sampling)
    assert comparison.predicted.steps == answer.acceptance.drafts and not comparison.differs
    assert comparison.predicted.per_position == pytest.approx(answer.acceptance.per_position)
    assert comparison.not_picked == 0 and comparison.chain.differing == 0 and not comparison.chain.other_target


def cause_of(student: Student, answer: Served, sampling: Sampling = SAMPLED) -> str:
    loaded, comparison = compare(student, answer, sampling)
    assert comparison.differs
    return loaded.find_cause([comparison], K).name


def test_injected_faults_are_named():
    target = llama_target(vocab_size=12)
    student = random_student(target)
    assert cause_of(student, served(random_student(target, seed=5), Sampling(0.0)), Sampling(0.0)) == "head"
    assert cause_of(student, served(student, SAMPLED, drafts=1)) == "drafts"
    other = random_student(llama_target(vocab_size=12, seed=9))
    loaded, comparison = compare(student, served(other, SAMPLED), SAMPLED)
    assert loaded.find_cause([comparison], K).name == "target"


def test_numbers_of_other_seeds_are_named():
    """The text has the target's distribution, but the u of these requests do not pick it."""
    student = random_student(llama_target(vocab_size=12))
    loaded, comparison = compare(student, served(student, SAMPLED, seeds=[seed + 100 for seed in SEEDS]), SAMPLED)
    assert comparison.not_picked > 0.2 and not comparison.chain.other_target
    cause = loaded.find_cause([comparison], K)
    assert cause.name == "u" and "verify by u" in cause.sentence


def test_rows_with_the_wrong_u_are_named():
    """A student that reads u well; the served one had the numbers of one position too early on its rows."""
    sampling = Sampling(1.0)
    right = oracle("o-ptp", vocab_size=12, window=K + 1)
    answer = served(random_student(right.target), sampling, tokens=7)
    loaded, comparison = compare(right, answer, sampling)
    before = ptp_acceptance.collect(
        right, comparison.samples, sampling, K, u=comparison.u, carried=comparison.u.roll(1, 1)
    )
    figures = StepMetrics.of(*before.steps(two_pass=True))
    reached = tuple(round(share * figures.steps) for share in figures.per_position)
    counted = Acceptance(round(figures.steps), K * round(figures.steps), sum(reached), reached)
    wrong = replace(comparison, served=replace(answer, acceptance=counted))
    cause = loaded.find_cause([wrong], K)
    assert cause.name == "u" and "before the right one" in cause.sentence


def test_a_head_that_does_not_read_u_is_named():
    student = random_student(llama_target(vocab_size=12))
    for value in student.lora().values():
        value.zero_()  # rows that see u, and a target that was never taught to
    loaded, comparison = compare(student, served(student, SAMPLED), SAMPLED)
    assert not comparison.differs and loaded.find_untrained_head([comparison], K).name == "u"
    reader = oracle("o-ptp", vocab_size=12, window=K + 1)
    answer = served(random_student(reader.target), Sampling(1.0), tokens=7)
    loaded, comparison = compare(reader, answer, Sampling(1.0))
    assert loaded.find_untrained_head([comparison], K) is None
    baseline = random_student(llama_target(vocab_size=12), "independent")
    loaded, comparison = compare(baseline, served(baseline, SAMPLED), SAMPLED)
    assert loaded.find_untrained_head([comparison], K) is None  # the baseline is not meant to


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head of random weights for the demo's target."""
    folder = tmp_path_factory.mktemp("ptp") / "head"
    target = load_target(demo.path("target"), attention="torch")
    student = random_student(target, verifier=str(demo.path("target")))
    save_ptp(folder, student.config, student.lora(), student.embedding, {}, "made by a test", torch.float32)
    return str(folder)


def arguments(head: str, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args([head, "--dtype", "float32", *given])


def test_refusal_where_v2_cannot_run_is_one_line(head, monkeypatch):
    from vllm_mtpc.engine import served as module
    from vllm_mtpc.errors import EngineFailed

    def refuse(engine, prompts, temperatures, max_tokens, log, **more):
        assert engine["speculative_config"]["method"] == "ptp" and more["seeds"] == [0, 1]
        log.write_text("ServeConfigError: method 'ptp' on Model Runner V1: it drafts from token lists\n")
        raise EngineFailed("the engine ended with exit code 1")

    monkeypatch.setattr(module, "serve", refuse)
    with pytest.raises(doctor.UsageError, match="Model Runner V2 alone") as caught:
        doctor.run(arguments(head, "--prompts", "2", "--max-tokens", "12", "--device", "cpu"))
    assert "\n" not in str(caught.value)


def test_a_draft_pass_is_of_ptp_heads_alone():
    with pytest.raises(MtpcError, match="name a PTP head"):
        doctor.run(arguments(str(demo.path("btree")), "--draft-pass", "merged"))


@pytest.mark.slow
@pytest.mark.parametrize("draft_pass", ["two-pass", "merged"])
def test_vllm_serves_as_predicted(head, draft_pass, monkeypatch, root):
    """Model Runner V2 in Triton's interpreter."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(root / "scripts" / "interpreter"))
    args = arguments(head, "--prompts", "3", "--max-tokens", "24", "--device", "cpu", "--draft-pass", draft_pass)
    diagnosis = doctor.diagnose(args)
    for comparison in diagnosis.comparisons:
        assert comparison.served.acceptance.drafts == comparison.predicted.steps
        assert comparison.difference == pytest.approx(0) and comparison.not_picked == 0
    assert diagnosis.cause is None or diagnosis.cause.name == "u"  # a random head need not read u
