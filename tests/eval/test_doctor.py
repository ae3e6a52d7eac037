"""`vllm-mtpc doctor`: served and expected counters agree, and injected faults are noticed.

Most tests replace the server by the decoding loop on the Hugging Face target, which counts as vLLM does (PTP heads:
with two passes); one starts vLLM itself. tests/e2e/test_ptp.py compares PTP drafts of vLLM with the evaluator's.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.demo import demo_heads
from tests.support.serve import program
from tests.support.tiny import Decoded, Rejection, TableTarget, continue_all, llama_target, tiny_head
from tests.support.tiny_ptp import continue_prompt, random_student
from vllm_mtpc.data.prompts import held_out
from vllm_mtpc.engine import served as engine
from vllm_mtpc.engine import server
from vllm_mtpc.engine.served import Served
from vllm_mtpc.engine.server import Acceptance
from vllm_mtpc.errors import EngineFailed, UsageError
from vllm_mtpc.eval import doctor
from vllm_mtpc.eval.circuit_evaluator import MtpcEvaluator, collect, noise_given_text, summarise
from vllm_mtpc.eval.evaluator import Diagnosis, Requests, load
from vllm_mtpc.eval.ptp_evaluator import PtpEvaluator
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.heads.head import build_head
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import bind, load_target

HEAD = str(demo_heads.path("btree"))
K, PROMPTS, TOKENS = 7, 4, 40
PTP_K, PTP_TOKENS = 4, 32
PTP_PROMPTS = [[5, 6, 7], [1], [2, 9, 9, 9], [11, 3, 1], [4, 4], [8, 10]]
SEEDS = [7, 8, 9, 10, 11, 12]
SAMPLED, GREEDY = Sampling(0.9, 0.95, top_k=10), Sampling(0.0)


def as_served(texts: list[Decoded], temperature: float, num_drafts: int) -> Served:
    kept = [count for text in texts for count in text.accepted]
    reached = tuple(sum(count >= k for count in kept) for k in range(1, num_drafts + 1))
    counted = Acceptance(len(kept), num_drafts * len(kept), sum(kept), reached)
    return Served(temperature, [text.tokens for text in texts], counted, "float32")


@pytest.fixture(scope="module")
def loaded() -> MtpcEvaluator:
    return load(HEAD)


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    return [loaded.target.tokenizer(text).input_ids[:64] for text in held_out(PROMPTS)]


def serve(head, target, prompts, temperature: float, num_drafts: int = K) -> Served:
    drafting = Rejection(head, Sampling(temperature), torch.Generator().manual_seed(3), num_drafts)
    texts = continue_all(target, [torch.tensor(prompt) for prompt in prompts], drafting, TOKENS)
    return as_served(texts, temperature, num_drafts)


@pytest.fixture(scope="module")
def healthy(loaded, prompts) -> list[Served]:
    return [serve(loaded.head, loaded.target, prompts, temperature) for temperature in (0.0, 1.0)]


def compare(loaded, prompts, served: Served):
    return loaded.compare(Requests(prompts, K), served)


def test_greedy_counters_are_predicted_to_the_step(loaded, prompts, healthy):
    greedy, sampled = (compare(loaded, prompts, one) for one in healthy)
    assert greedy.served.acceptance.drafts == round(greedy.predicted.steps)
    assert greedy.difference == pytest.approx(0, abs=1e-9)
    assert greedy.noise == pytest.approx(0, abs=1e-6)  # float32 sums
    assert greedy.chain.differing == 0 and greedy.chain.tokens == PROMPTS * TOKENS
    assert 0 < sampled.noise < 0.25 and not sampled.differs
    assert abs(sampled.chain.surprise) < 4
    assert greedy.fault is None and sampled.fault is None


def test_noise_is_that_of_repeated_serving():
    """The exact standard error given the text, against 4,000 walks over one text's steps."""
    contexts = collect(tiny_head("hmm"), TableTarget(), TableTarget().write(3, 30, greedy=False), Sampling(1.0))
    alive, ends = contexts.text.tolist(), contexts.valid.sum(1).tolist()
    assert torch.equal(contexts.valid, torch.arange(contexts.valid.shape[1]) < torch.tensor(ends)[:, None])
    draw, values = random.Random(0).random, []
    for _ in range(4000):
        accepted = steps = 0
        for row, end in zip(alive, ends, strict=True):
            at = 0
            while at < end:
                uniform = draw()
                count = sum(chance > uniform for chance in row[at])
                accepted, steps, at = accepted + count, steps + 1, at + 1 + count
        values.append(1 + accepted / steps)
    values = torch.tensor(values)
    assert values.mean().item() == pytest.approx(summarise(contexts, overlap=False).tokens_per_step, abs=0.02)
    # 4,000 walks tell the spread to 1 %; a ratio of sums over some 40 steps is not quite linear
    assert noise_given_text(contexts) == pytest.approx(values.std().item(), rel=0.1)


def test_other_drafts_are_noticed(loaded, prompts, healthy):
    """Drafts of another head, of random weights, without the head's draft layers, and fewer of them than asked for."""
    torch.manual_seed(0)
    others = [load(str(demo_heads.path("ff"))).head, build_head(loaded.config).eval().requires_grad_(False)]
    bind(others[1], loaded.target)
    cases = [(loaded, serve(head, loaded.target, prompts, 0.0)) for head in others]
    layers, generator = LoraDraftLayers(loaded.target, 1), torch.Generator().manual_seed(0)
    for value in layers.parameters():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    cases.append((replace(loaded, draft_layers=layers), healthy[0]))
    for evaluator, answer in cases:
        assert compare(evaluator, prompts, answer).fault == "vLLM does not accept the expected number of drafts"
    fewer = compare(loaded, prompts, serve(loaded.head, loaded.target, prompts, 0.0, num_drafts=2))
    assert fewer.fault == "vLLM verified 2.0 drafts per step, expected were 7"
    good = compare(loaded, prompts, healthy[0])
    assert "not healthy: at T=0 vLLM verified 2.0 drafts" in doctor.describe_health([fewer, good])
    within_noise = replace(good, predicted=replace(good.predicted, tokens_per_step=1.1), noise=9.0)
    assert doctor.describe_health([within_noise]).startswith("healthy within noise: more --prompts")
    assert doctor.describe_health([good]).startswith("healthy: ")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_target_is_noticed(loaded, prompts, tmp_path, temperature):
    """The demo's target with its last layer's weights turned around."""
    folder = Path(shutil.copytree(demo_heads.path("target"), tmp_path / "other"))
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.7.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].flip(0).contiguous()}, folder / "model.safetensors", {"format": "pt"})
    target = load_target(folder, attention="torch")
    fault = compare(loaded, prompts, serve(loaded.head, target, prompts, temperature)).fault
    assert ("standard errors from the target" if temperature else "served tokens are not the target's") in fault


def serve_ptp(student: Student, sampling: Sampling = SAMPLED, drafts=PTP_K, seeds=SEEDS, tokens=PTP_TOKENS) -> Served:
    pairs = zip(map(torch.tensor, PTP_PROMPTS), seeds, strict=True)
    texts = [continue_prompt(student, prompt, tokens, sampling, seed, drafts) for prompt, seed in pairs]
    return as_served(texts, sampling.temperature, drafts)


def compare_ptp(student: Student, answer: Served, sampling: Sampling = SAMPLED) -> Diagnosis:
    loaded = PtpEvaluator(Path("head"), student.config, student, student.target)
    return loaded.compare(Requests(PTP_PROMPTS, PTP_K, sampling.top_k, sampling.top_p, SEEDS), answer)


@pytest.mark.parametrize("variant", ["o-ptp", "c-ptp"])
@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY])
def test_ptp_counters_are_predicted_to_the_step(variant, sampling):
    student = random_student(llama_target(vocab_size=12), variant)
    answer = serve_ptp(student, sampling)
    comparison = compare_ptp(student, answer, sampling)
    assert comparison.predicted.steps == answer.acceptance.drafts and comparison.fault is None
    assert comparison.predicted.per_position == pytest.approx(answer.acceptance.per_position)
    assert comparison.chain.differing == 0


def test_faults_of_ptp_heads_are_noticed():
    """Another head, number of drafts, target, and other seeds: then the text is the target's, but not what u picks."""
    target = llama_target(vocab_size=12)
    # doctor compares counts first: seed 9 gives by chance as many right drafts as seed 0
    student, other = random_student(target), random_student(llama_target(vocab_size=12, seed=10))
    cases = {
        "the expected number of drafts": (serve_ptp(random_student(target, seed=5), GREEDY), GREEDY),
        "1.0 drafts per step": (serve_ptp(student, drafts=1), SAMPLED),
        "not the target's": (serve_ptp(other), SAMPLED),
        "served tokens": (serve_ptp(student, seeds=[seed + 100 for seed in SEEDS]), SAMPLED),
    }
    for words, (answer, sampling) in cases.items():
        comparison = compare_ptp(student, answer, sampling)
        assert words in comparison.fault
    assert comparison.chain.differing > 0.2 * comparison.chain.tokens and abs(comparison.chain.surprise) < 5


def arguments(head: str, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args([head, "--dtype", "float32", *words])


def test_refusal_of_the_engine_is_shown(monkeypatch, capsys):
    def refuse(engine, prompts, temperatures, max_tokens, log, **more):
        assert engine["speculative_config"]["method"] == "ptp" and more["seeds"] == [0, 1]
        raise EngineFailed("the engine ended with exit code 1\nServeConfigError: method 'ptp' on Model Runner V1")

    monkeypatch.setattr(engine, "serve", refuse)
    with pytest.raises(UsageError, match="the end of its log is above"):
        doctor.run(arguments(str(demo_heads.path("o-ptp")), "--prompts", "2", "--max-tokens", "12", "--device", "cpu"))
    assert "method 'ptp' on Model Runner V1" in capsys.readouterr().err


def test_vllm_serves_the_demo_as_predicted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setattr(server, "PROGRAM", program())
    report, log = tmp_path / "report.json", tmp_path / "vllm.log"
    files = ("--json", str(report), "--log", str(log))
    assert doctor.run(arguments(HEAD, "--prompts", "4", "--max-tokens", "48", *files)) == 0
    printed = capsys.readouterr().out
    assert "tokens/step:" in printed and "\nhealthy" in printed
    started = "Model Runner V1, CUDA graphs of the target: NONE, of drafts: NONE; MtpcSpeculativeConfig("
    assert log.read_text().count(started) == 1
    found = json.loads(report.read_text())
    for comparison in found["comparisons"]:
        assert abs(comparison["difference"]) < max(0.02, 3 * comparison["standard_error"])
        assert comparison["text"]["tokens_differing"] == 0
        assert comparison["served"]["tokens_per_step"] > 1.5
    assert [comparison["temperature"] for comparison in found["comparisons"]] == [0.0, 1.0]
