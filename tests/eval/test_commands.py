"""`vllm-mtpc eval` of a packaged circuit and of a random PTP head, through its arguments."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.demo import demo_heads
from tests.support.tiny import llama_target
from vllm_mtpc.data.prompts import held_out
from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.eval import command, doctor, text
from vllm_mtpc.eval.evaluator import attach

HEAD = str(demo_heads.path("btree"))


def run_program(program: ModuleType, head: str, *words: str) -> int:
    parser = argparse.ArgumentParser()
    program.add_arguments(parser)
    return program.run(parser.parse_args([head, "--dtype", "float32", *words]))


@pytest.fixture(scope="module")
def ptp_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The packaged head, with another distribution than the default one in its config."""
    folder = Path(shutil.copytree(demo_heads.path("o-ptp"), tmp_path_factory.mktemp("ptp") / "o-ptp"))
    shutil.copytree(demo_heads.path("target"), folder.with_name("target"))
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "../target"
    config |= {"trained_temperature": 0.7, "trained_top_k": 20, "trained_top_p": 0.9}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": opening}) + "\n" for opening in held_out(8)))
    return str(file)


def test_eval_prints_and_writes_results(data, tmp_path, capsys):
    report, small = tmp_path / "eval.json", ("--sequences", "6", "--new-tokens", "40", "--num-drafts", "3")
    assert run_program(command, HEAD, "--data", data, *small, "--json", str(report)) == 0
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
    assert greedy["along_text"]["steps"] == pytest.approx(greedy["expected"]["steps"], abs=1e-6)


def test_eval_of_ptp_head_uses_the_trained_sampling(ptp_head, data, tmp_path, capsys):
    report, small = tmp_path / "eval.json", ("--sequences", "4", "--new-tokens", "16")
    assert run_program(command, ptp_head, "--data", data, *small, "--json", str(report)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(part in printed for part in ("merged pass, ideal", "two passes", "with the u of other windows", "T=0.7"))
    found = json.loads(report.read_text())
    assert [row["temperature"] for row in found["results"]] == [0.7, 0.0] and found["num_drafts"] == 7
    assert found["settings"]["top_k"] == 20 and found["settings"]["top_p"] == 0.9
    for figures in (row["figures"] for row in found["results"]):
        assert figures["tokens_per_step"] == pytest.approx(1 + sum(figures["per_position"]))
        assert sum(figures["histogram"]) == pytest.approx(1) and len(figures["histogram"]) == 8
    words = ("--sequences", "2", "--new-tokens", "8", "--temperature", "1.5", "--top-k", "0", "--top-p", "1")
    assert run_program(command, ptp_head, "--data", data, *words) == 0
    assert "was trained at temperature 0.7, top-k 20, top-p 0.9" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("program", "kind", "words", "message"),
    [
        (command, "mtpc", "--data nowhere.txt", "no such file"),
        (command, "mtpc", "--data x --temperature -1", "temperature=-1"),
        (command, "mtpc", "--data x --top-p 2", "top_p=2"),
        (command, "ptp", "--data x --top-k -1", "top_k=-1"),
        (command, "mtpc", "--data x --sequences 0", "allowed are 1 and above"),
        (command, "mtpc", "--data x --num-drafts 8", "allowed are 1 to 7"),
        (command, "ptp", "--data x --num-drafts 8", "allowed are 1 to 7"),
        (command, "mtpc", "--data {data} --new-tokens 8190", "lower --new-tokens"),
        (doctor, "mtpc", "--prompts 0", "allowed are 1 and above"),
        (doctor, "mtpc", "--num-drafts 0", "allowed are 1 to 7"),
        (doctor, "mtpc", "--max-tokens 8190", "lower --max-tokens"),
        (doctor, "mtpc", "--draft-pass merged", "name a PTP head"),
    ],
)
def test_request_is_refused_in_one_line(ptp_head, data, program, kind, words, message):
    head = ptp_head if kind == "ptp" else HEAD
    with pytest.raises(MtpcError, match=message) as caught:
        run_program(program, head, *words.format(data=data).split())
    assert "\n" not in str(caught.value)


def test_head_of_another_size_is_refused(ptp_head):
    for folder in (demo_heads.path("cp"), Path(ptp_head)):
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
