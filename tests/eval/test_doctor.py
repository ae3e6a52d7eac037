"""The doctor on the packaged demo: agreement within 2 %, and injected faults named by their cause.

Most tests replace the server by the decoding loop on the Hugging Face target, which counts as vLLM does;
two tests start vLLM itself, healthy and, in the slow one, with a fault.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import Rejection, TableTarget, continue_all, tiny_head
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import load_head, save_head
from vllm_mtpc.data.prompts import held_out
from vllm_mtpc.data.sources import load_documents
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.served import Served
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.eval import doctor
from vllm_mtpc.eval.acceptance import collect, summarise
from vllm_mtpc.eval.circuit_evaluator import MtpcEvaluator, noise_given_text
from vllm_mtpc.eval.evaluator import Asked, attach, load
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.adapters import DraftLayers
from vllm_mtpc.hf import load_target

K, PROMPTS, TOKENS = 7, 4, 40


@pytest.fixture(scope="module")
def loaded() -> MtpcEvaluator:
    return load(str(demo.path("btree")))


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    return [loaded.target.tokenizer(text).input_ids[:64] for text in held_out(PROMPTS)]


def serve(head, target, prompts, temperature: float, num_drafts: int = K) -> Served:
    """Counters of the serving rule on the Hugging Face target, in vLLM's form."""
    drafting = Rejection(head, Sampling(temperature), torch.Generator().manual_seed(3), num_drafts)
    texts = continue_all(target, [torch.tensor(p) for p in prompts], drafting, TOKENS)
    kept = [count for text in texts for count in text.accepted]
    reached = tuple(sum(count >= k for count in kept) for k in range(1, num_drafts + 1))
    counted = Acceptance(len(kept), num_drafts * len(kept), sum(kept), reached)
    return Served(temperature, [text.tokens for text in texts], counted, "float32")


@pytest.fixture(scope="module")
def healthy(loaded, prompts) -> list[Served]:
    return [serve(loaded.head, loaded.target, prompts, temperature) for temperature in (0.0, 1.0)]


def compare(loaded, prompts, served: Served):
    return loaded.compare(Asked(prompts, K), served)


def test_greedy_counters_are_predicted_to_the_step(loaded, prompts, healthy):
    greedy, sampled = (compare(loaded, prompts, one) for one in healthy)
    assert greedy.served.acceptance.drafts == round(greedy.predicted.steps)
    assert greedy.difference == pytest.approx(0, abs=1e-9)
    assert greedy.noise == pytest.approx(0, abs=1e-6)  # float32 sums
    assert greedy.chain.differing == 0 and greedy.chain.tokens == PROMPTS * TOKENS
    assert 0 < sampled.noise < 0.2 and not sampled.differs
    assert abs(sampled.chain.surprise) < 4
    assert loaded.find_untrained_head([greedy, sampled], K) is None


def test_noise_is_that_of_repeated_serving():
    """The exact standard error given the text, against 4,000 walks over one text's steps."""
    contexts = collect(tiny_head("hmm"), TableTarget(), TableTarget().write(3, 30, greedy=False), Sampling(1.0))
    alive, valid = contexts.text, contexts.valid
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(4000):
        accepted = steps = 0
        for row in range(3):
            at = 0
            while at < valid.shape[1] and valid[row, at]:
                uniform = torch.rand((), generator=generator, dtype=torch.float64)
                count = int((alive[row, at] > uniform).sum())
                accepted, steps, at = accepted + count, steps + 1, at + 1 + count
        values.append(1 + accepted / steps)
    values = torch.tensor(values)
    assert values.mean().item() == pytest.approx(summarise(contexts, overlap=False).tokens_per_step, abs=0.02)
    # 4,000 walks tell the spread to 1 %; a ratio of sums over some 40 steps is not quite linear
    assert noise_given_text(contexts) == pytest.approx(values.std().item(), rel=0.1)


def test_states_without_the_draft_layers_are_named(loaded, prompts, healthy):
    """A head with large adapters, served without them."""
    layers = DraftLayers(loaded.target, 1)
    generator = torch.Generator().manual_seed(0)
    for value in layers.parameters():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    layered = replace(loaded, draft_layers=layers)
    comparison = compare(layered, prompts, healthy[0])
    assert comparison.differs
    cause = layered.find_cause([comparison], K)
    assert cause.name == "hidden state" and "without its draft layers" in cause.sentence


def random_head(loaded) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_head(loaded.config).eval().requires_grad_(False)


def test_another_head_is_named(loaded, prompts):
    """A trained one, and one of random weights, whose acceptance is at chance."""
    for head, name in ((load(str(demo.path("ff"))).head, "head"), (random_head(loaded), "hidden state")):
        comparison = compare(loaded, prompts, serve(head, loaded.target, prompts, 0.0))
        assert comparison.differs and loaded.find_cause([comparison], K).name == name


def other_target(folder):
    """The demo's target with its last layer's weights turned around."""
    shutil.copytree(demo.path("target"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.7.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].flip(0).contiguous()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_target_is_named(loaded, prompts, tmp_path, temperature):
    target = load_target(other_target(tmp_path / "other"), attention="torch")
    comparison = compare(loaded, prompts, serve(loaded.head, target, prompts, temperature))
    assert comparison.chain.other_target and loaded.find_cause([comparison], K).name == "target"


def test_other_numbers_of_drafts_are_named(loaded, prompts, healthy):
    fewer = compare(loaded, prompts, serve(loaded.head, loaded.target, prompts, 0.0, num_drafts=2))
    cause = loaded.find_cause([fewer], K)
    assert fewer.differs and cause.name == "drafts" and "2.0 drafts per step" in cause.sentence
    counted = healthy[0].acceptance
    reached = (*counted.accepted_per_position[:2], *[0] * (K - 2))
    lost = replace(counted, accepted_tokens=sum(reached), accepted_per_position=reached)
    cause = loaded.find_cause([compare(loaded, prompts, replace(healthy[0], acceptance=lost))], K)
    assert cause.name == "drafts" and "beyond position 2" in cause.sentence


def test_lost_precision_is_named(loaded, prompts, tmp_path):
    """Weights of which bfloat16 keeps little: a large common part under the differences that matter."""
    folder = tmp_path / "coarse"
    config, coarse = load_head(demo.path("btree"))
    coarse.leaf_weight.data += 40.0  # the softmax does not see it; float32 keeps 5 digits below it, bfloat16 none
    save_head(folder, config, coarse, {}, "made by a test", torch.float32)
    rounded = MtpcEvaluator.attach(folder, loaded.target, torch.bfloat16).head
    patient = attach(folder, loaded.target)
    comparison = compare(patient, prompts, serve(rounded, loaded.target, prompts, 0.0))
    cause = patient.find_cause([comparison], K)
    assert comparison.differs and cause.name == "precision" and "bfloat16" in cause.sentence


def test_a_head_for_other_weights_is_named(loaded, prompts):
    """Served as predicted, and no better than chance on either side."""
    untrained = replace(loaded, head=random_head(loaded))
    comparison = compare(untrained, prompts, serve(untrained.head, loaded.target, prompts, 0.0))
    assert not comparison.differs and untrained.find_untrained_head([comparison], K).name == "hidden state"


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args([str(demo.path("btree")), *given])


def test_bad_requests_are_refused_before_anything_starts():
    for given, message in (
        (["--prompts", "0"], "allowed are 1 and above"),
        (["--max-tokens", "1000"], "lower --max-tokens"),
        (["--num-drafts", "0"], "allowed are 1 to 7"),
    ):
        with pytest.raises(MtpcError, match=message):
            doctor.run(arguments(*given))
    with pytest.raises(SystemExit):
        arguments("--engine", "[]")


def test_vllm_serves_the_demo_as_predicted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    report = tmp_path / "report.json"
    few = ("--prompts", "8", "--max-tokens", "64", "--dtype", "float32")
    record, log = tmp_path / "served.jsonl", tmp_path / "vllm.log"
    args = arguments(*few, "--json", str(report), "--record", str(record), "--log", str(log))
    assert doctor.run(args) == 0
    printed = capsys.readouterr().out
    assert "tokens/step:" in printed and "\nhealthy" in printed
    started = "Model Runner V1, CUDA graphs of the target: NONE, of drafts: NONE; MtpcSpeculativeConfig("
    assert log.read_text().count(started) == 1
    found = json.loads(report.read_text())
    for comparison in found["comparisons"]:
        assert abs(comparison["difference"]) < max(0.02, 3 * comparison["standard_error"])
        assert comparison["text"]["greedy_tokens_differing"] == 0
        assert comparison["served"]["tokens_per_step"] > 1.5
    assert [comparison["temperature"] for comparison in found["comparisons"]] == [0.0, 1.0]
    kept = load_documents([str(record)], None)  # eight answers at each temperature, as data to train on
    assert len(kept) == 16 and all(0 < trained.sum() <= 64 for _, trained in kept)


@pytest.mark.slow
def test_vllm_serving_another_target_is_noticed(tmp_path, capsys):
    injected = str(other_target(tmp_path / "other"))
    few = ("--prompts", "4", "--max-tokens", "32", "--temperature", "0", "--dtype", "float32")
    diagnosis = doctor.diagnose(arguments(*few, "--engine", json.dumps({"model": injected})))
    assert diagnosis.cause.name == "target" and "another target" in diagnosis.verdict
