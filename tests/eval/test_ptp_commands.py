"""`vllm-mtpc eval` and `vllm-mtpc generate` of a PTP head on the demo's target, through their arguments."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.tiny import llama_target
from tests.support.tiny_ptp import random_student
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import save_ptp
from vllm_mtpc.data.prompts import held_out
from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.eval import command, generate, loading
from vllm_mtpc.hf import load_target


def call(module: ModuleType, head: str | Path, *given: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(head), "--dtype", "float32", *given]))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head of random weights, trained for another distribution than the default one by its config."""
    folder = tmp_path_factory.mktemp("ptp") / "head"
    distribution = {"trained_temperature": 0.7, "trained_top_k": 20, "trained_top_p": 0.9}
    student = random_student(
        load_target(demo.path("target"), attention="torch"), verifier=str(demo.path("target")), window=4, **distribution
    )
    save_ptp(folder, student.config, student.lora(), student.embedding, {}, "made by a test")
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": opening}) + "\n" for opening in held_out(8)))
    return str(file)


def test_eval_prints_and_writes_the_figures(head, data, tmp_path, capsys):
    report = tmp_path / "eval.json"
    small = ("--sequences", "4", "--new-tokens", "16", "--simulate", "4", "--candidates", "1", "2")
    assert call(command, head, "--data", data, *small, "--json", str(report)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for what in ("merged pass, ideal", "two passes", "with the u of other windows", "best of 2 candidates", "T=0.7"):
        assert what in printed
    assert "P(exactly g drafts accepted)" in printed and "the target's own token included" in printed
    found = json.loads(report.read_text())
    assert [row["temperature"] for row in found["results"]] == [0.7, 0.0] and found["num_drafts"] == 3
    assert found["settings"]["top_k"] == 20 and found["settings"]["top_p"] == 0.9
    for row in found["results"]:
        figures = row["figures"]
        assert figures["tokens_per_step"] == pytest.approx(1 + sum(figures["per_position"]))
        assert sum(figures["histogram"]) == pytest.approx(1) and len(figures["histogram"]) == 4
        assert 1 <= row["merged"][0]["tokens_per_step"] <= figures["tokens_per_step"] + 0.3
        assert len(row["candidates"]) == (2 if row["temperature"] else 0)
    greedy = found["results"][1]  # one text, whoever writes it
    assert greedy["simulated"]["tokens_per_step"] == pytest.approx(greedy["figures"]["two_pass_tokens_per_step"])
    assert greedy["simulated"]["steps"] <= greedy["figures"]["contexts"]


def test_another_distribution_than_the_trained_one_is_noted(head, data, capsys):
    given = ("--sequences", "2", "--new-tokens", "8", "--temperature", "1.5", "--top-k", "0", "--top-p", "1")
    assert call(command, head, "--data", data, *given) == 0
    assert "was trained at temperature 0.7, top-k 20, top-p 0.9" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("distribution", [("--argmax",), (), ("--temperature", "1", "--top-k", "0", "--top-p", "1")])
def test_generate_writes_the_text_of_its_seed(head, distribution, capsys):
    texts = {}
    for mode, seed in (("stp", "3"), ("speculative", "3"), ("speculative", "4")):
        given = ("--prompt", "def main(", "--num-tokens", "40", "--mode", mode, "--seed", seed, "--json", *distribution)
        assert call(generate, head, *given) == 0
        texts[mode, seed] = json.loads(capsys.readouterr().out)
    assert texts["stp", "3"]["tokens"] == texts["speculative", "3"]["tokens"]
    assert (texts["speculative", "4"]["tokens"] == texts["stp", "3"]["tokens"]) == (distribution == ("--argmax",))
    assert texts["speculative", "3"]["acceptance_per_position"][0] == 1  # x_2 is the target's own


def test_generate_says_what_a_step_is(head, capsys):
    assert call(generate, head, "--prompt", "def main(", "--num-tokens", "8", "--num-drafts", "2") == 0
    assert "a step is two passes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("module", "given", "message"),
    [
        (command, ["--data", "nowhere.txt", "--candidates", "0"], "allowed are 1 and above"),
        (command, ["--data", "nowhere.txt", "--top-k", "-1"], "top_k=-1"),
        (generate, ["--prompt", "x", "--num-drafts", "4"], "allowed are 1 to 3"),
        (generate, ["--prompt", "x", "--top-k", "-2"], "top_k=-2"),
    ],
)
def test_bad_requests_are_one_line(head, module, given, message):
    with pytest.raises(MtpcError, match=message) as caught:
        call(module, head, *given)
    assert "\n" not in str(caught.value)


def test_candidates_are_of_ptp_heads_alone(data):
    with pytest.raises(MtpcError, match="name a PTP head"):
        call(command, demo.path("btree"), "--data", data, "--candidates", "4")


def test_a_head_of_another_target_is_refused(head):
    with pytest.raises(UsageError, match="vocab_size=257, but target tiny has 40"):
        loading.attach(Path(head), llama_target(vocab_size=40))
