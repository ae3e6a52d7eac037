"""`vllm-mtpc eval` of a packaged circuit and of a random PTP head, through its arguments."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.tiny import llama_target
from tests.support.tiny_ptp import random_student
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import save_ptp
from vllm_mtpc.data.prompts import held_out
from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.eval import command, text
from vllm_mtpc.eval.acceptance import measure
from vllm_mtpc.eval.evaluator import attach, load
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.heads.adapters import DraftLayers
from vllm_mtpc.hf import load_target

HEAD = str(demo.path("btree"))


def run_eval(head: str, *given: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([head, "--dtype", "float32", *given]))


@pytest.fixture(scope="module")
def ptp_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PTP head of random weights whose config names a distribution other than the default one."""
    folder = tmp_path_factory.mktemp("ptp") / "head"
    options = {"trained_temperature": 0.7, "trained_top_k": 20, "trained_top_p": 0.9, "window": 4}
    target = load_target(demo.path("target"), attention="torch")
    student = random_student(target, verifier=str(demo.path("target")), **options)
    save_ptp(folder, student.config, student.lora(), student.embedding, {}, "made by a test")
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": opening}) + "\n" for opening in held_out(8)))
    return str(file)


def test_eval_prints_and_writes_results(data, tmp_path, capsys):
    report = tmp_path / "eval.json"
    small = ("--sequences", "6", "--new-tokens", "40", "--num-drafts", "3")
    assert run_eval(HEAD, "--data", data, *small, "--json", str(report)) == 0
    printed = capsys.readouterr().out
    assert "tokens/step, expected" in printed and "T=1" in printed and "T=0" in printed
    assert "the target's own token included" in printed and "unconditional" in printed  # both definitions
    found = json.loads(report.read_text())
    assert found["num_drafts"] == 3 and [row["temperature"] for row in found["results"]] == [1.0, 0.0]
    for row in found["results"]:
        expected = row["expected"]
        assert 1 < expected["tokens_per_step"] < 4 and len(expected["per_position"]) == 3
        assert expected["tokens_per_step"] == pytest.approx(1 + sum(expected["per_position"]), abs=1e-6)
        assert expected["joint_bits"] > expected["target_bits"]  # a circuit cannot know the future
    greedy = found["results"][1]
    for name in ("tokens_per_step", "steps"):
        assert greedy["along_text"][name] == pytest.approx(greedy["expected"][name], abs=1e-6)


def test_eval_of_ptp_head_prints_and_writes_results(ptp_head, data, tmp_path, capsys):
    report = tmp_path / "eval.json"
    small = ("--sequences", "4", "--new-tokens", "16")
    assert run_eval(ptp_head, "--data", data, *small, "--json", str(report)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for what in ("merged pass, ideal", "two passes", "with the u of other windows", "T=0.7"):
        assert what in printed
    assert "P(exactly g drafts accepted)" in printed and "the target's own token included" in printed
    found = json.loads(report.read_text())
    assert [row["temperature"] for row in found["results"]] == [0.7, 0.0] and found["num_drafts"] == 3
    assert found["settings"]["top_k"] == 20 and found["settings"]["top_p"] == 0.9
    for row in found["results"]:
        figures = row["figures"]
        assert figures["tokens_per_step"] == pytest.approx(1 + sum(figures["per_position"]))
        assert sum(figures["histogram"]) == pytest.approx(1) and len(figures["histogram"]) == 4
    given = ("--sequences", "2", "--new-tokens", "8", "--temperature", "1.5", "--top-k", "0", "--top-p", "1")
    assert run_eval(ptp_head, "--data", data, *given) == 0
    assert "was trained at temperature 0.7, top-k 20, top-p 0.9" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("mtpc", (), "no such file"),
        ("mtpc", ("--temperature", "-1"), "temperature=-1"),
        ("mtpc", ("--top-p", "2"), "top_p=2"),
        ("mtpc", ("--sequences", "0"), "allowed are 1 and above"),
        ("mtpc", ("--num-drafts", "8"), "allowed are 1 to 7"),
        ("ptp", ("--num-drafts", "4"), "allowed are 1 to 3"),
        ("ptp", ("--top-k", "-1"), "top_k=-1"),
    ],
)
def test_bad_request_is_refused_in_one_line(ptp_head, kind, given, message):
    with pytest.raises(MtpcError, match=message) as caught:
        run_eval(ptp_head if kind == "ptp" else HEAD, "--data", "nowhere.txt", *given)
    assert "\n" not in str(caught.value)


def test_texts_longer_than_the_target_are_refused(data):
    with pytest.raises(UsageError, match="lower --new-tokens"):
        run_eval(HEAD, "--data", data, "--new-tokens", "8190")


def test_head_of_another_size_is_refused(ptp_head):
    for folder in (demo.path("cp"), Path(ptp_head)):
        with pytest.raises(UsageError, match="vocab_size=257, but target tiny has 40"):
            attach(folder, llama_target(vocab_size=40))


def test_prompts_are_the_tokens_before_the_trained_ones():
    """Chat: all up to the first trained token. Text: crops, no document too short, repeated where there are too few."""
    trained = [[False] * 3 + [True] * 2, [True] * 10, [True] * 3]
    documents = [(np.arange(100 * at, 100 * at + len(mask)), np.array(mask)) for at, mask in enumerate(trained)]
    found = text.prompts(documents, 9, 4, seed=0)
    chats = [prompt.tolist() for prompt in found if prompt[0] < 100]
    crops = [prompt.tolist() for prompt in found if prompt[0] >= 100]
    assert len(found) == 9 and len(chats) in (4, 5) and all(chat == [0, 1, 2] for chat in chats)
    assert all(len(crop) == 4 and 100 <= crop[0] <= 106 and crop == sorted(crop) for crop in crops)
    assert len({crop[0] for crop in crops}) > 1
    again = text.prompts(documents, 9, 4, seed=0)
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    with pytest.raises(UsageError, match="no document has 11 tokens"):
        text.prompts(documents[1:], 2, 11, seed=0)


def test_head_with_draft_layers_reads_their_states():
    """Adapters that are zero leave the target's own states, so the figures are those without them."""
    loaded = load(HEAD)
    prompts = [torch.tensor(loaded.target.tokenizer(opening).input_ids[:32]) for opening in held_out(3)]
    samples = text.generate(loaded.target, prompts, 24, Sampling(0.0), overhang=7)
    layers = DraftLayers(loaded.target, 1)
    read = text.with_draft_layers(samples, layers)
    plain = measure(loaded.head, loaded.target, samples, Sampling(0.0))
    assert measure(loaded.head, loaded.target, read, Sampling(0.0)).tokens_per_step == pytest.approx(
        plain.tokens_per_step
    )
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter)
    changed = text.with_draft_layers(samples, layers)
    assert measure(loaded.head, loaded.target, changed, Sampling(0.0)).tokens_per_step < plain.tokens_per_step
