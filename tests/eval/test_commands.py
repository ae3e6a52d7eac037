"""`vllm-mtpc eval` and `vllm-mtpc generate` of packaged circuits and of a random PTP head, through their arguments."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.support.tiny import llama_target
from tests.support.tiny_ptp import random_student
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import save_ptp
from vllm_mtpc.data.prompts import held_out
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.eval import command, generate, loading, text
from vllm_mtpc.hf import load_target

HEAD = str(demo.path("btree"))


def call(module: ModuleType, *given: str, head: str = HEAD) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([head, "--dtype", "float32", *given]))


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


def test_eval_prints_and_writes_the_figures(data, tmp_path, capsys):
    report = tmp_path / "eval.json"
    small = ("--sequences", "6", "--new-tokens", "40", "--num-drafts", "3", "--simulate", "6")
    assert call(command, "--data", data, *small, "--json", str(report)) == 0
    printed = capsys.readouterr().out
    assert "tokens/step, expected" in printed and "T=1" in printed and "T=0" in printed
    assert "the target's own token included" in printed and "unconditional" in printed  # both definitions
    found = json.loads(report.read_text())
    assert found["num_drafts"] == 3 and [row["temperature"] for row in found["results"]] == [1.0, 0.0]
    for row in found["results"]:
        expected, ceiling = row["expected"], row["ceiling"]
        assert 1 < expected["tokens_per_step"] < ceiling == 4.0
        assert len(expected["per_position"]) == 3
        assert expected["tokens_per_step"] == pytest.approx(1 + sum(expected["per_position"]), abs=1e-6)
        assert expected["joint_bits"] > expected["target_bits"]  # a circuit cannot know the future
    greedy = found["results"][1]
    for name in ("simulated", "along_text"):  # greedy: all write the same text
        assert greedy[name]["tokens_per_step"] == pytest.approx(greedy["expected"]["tokens_per_step"], abs=1e-9)
        assert greedy[name]["steps"] == pytest.approx(greedy["expected"]["steps"], abs=1e-6)


def test_modules_of_commands_import_neither_torch_nor_vllm():
    """Modules of commands do not import torch; evaluation does not import vLLM."""
    lines = (
        "import sys",
        "from vllm_mtpc.eval import command, doctor, generate",
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)",
        "from vllm_mtpc.eval import circuit_evaluator, evaluator, loading, ptp_evaluator",
        "assert 'vllm' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize("mode", ["stp", "mtp", "speculative"])
def test_generate_prints_text_and_statistics(mode, capsys):
    opening = ("--prompt", "def main(", "--num-tokens", "30", "--mode", mode, "--argmax")
    assert call(generate, *opening) == 0
    printed = capsys.readouterr().out
    assert call(generate, *opening, "--quiet") == 0
    quiet = capsys.readouterr().out
    assert "tokens/step" in quiet and f"{mode}, T=0" in quiet
    assert call(generate, *opening, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert printed.startswith(found["text"].rstrip()) and not quiet.startswith(found["text"][:10])
    assert len(found["tokens"]) == 30 and sum(found["histogram"]) == found["steps"]


def test_greedy_modes_agree(capsys):
    texts = []
    for mode in ("stp", "speculative"):
        call(generate, "--prompt", "class Reader:\n", "--num-tokens", "60", "--mode", mode, "--argmax", "--json")
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1]


def test_a_seed_fixes_sampled_text(capsys):
    texts = []
    for seed in ("0", "0", "1"):
        call(generate, "--prompt", "import ", "--num-tokens", "30", "--seed", seed, "--json")
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1] != texts[2]


def test_a_chat_prompt_takes_the_template():
    target = loading.load(HEAD).target
    with pytest.raises(MtpcError, match="no chat template"):
        generate.encode(target, "hello", chat=True)
    target.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ids = generate.encode(target, "hello", chat=True)
    assert target.tokenizer.decode(ids) == "[user]hello[assistant]"


def test_eval_of_ptp_head_prints_and_writes_the_figures(ptp_head, data, tmp_path, capsys):
    report = tmp_path / "eval.json"
    small = ("--sequences", "4", "--new-tokens", "16", "--simulate", "4", "--candidates", "1", "2")
    assert call(command, "--data", data, *small, "--json", str(report), head=ptp_head) == 0
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
    greedy = found["results"][1]  # all write the same text
    assert greedy["simulated"]["tokens_per_step"] == pytest.approx(greedy["figures"]["two_pass_tokens_per_step"])
    assert greedy["simulated"]["steps"] <= greedy["figures"]["contexts"]


def test_another_distribution_than_the_trained_one_is_noted(ptp_head, data, capsys):
    given = ("--sequences", "2", "--new-tokens", "8", "--temperature", "1.5", "--top-k", "0", "--top-p", "1")
    assert call(command, "--data", data, *given, head=ptp_head) == 0
    assert "was trained at temperature 0.7, top-k 20, top-p 0.9" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("distribution", [("--argmax",), (), ("--temperature", "1", "--top-k", "0", "--top-p", "1")])
def test_generate_writes_the_text_of_its_seed(ptp_head, distribution, capsys):
    texts = {}
    for mode, seed in (("stp", "3"), ("speculative", "3"), ("speculative", "4")):
        given = ("--prompt", "def main(", "--num-tokens", "40", "--mode", mode, "--seed", seed, "--json", *distribution)
        assert call(generate, *given, head=ptp_head) == 0
        texts[mode, seed] = json.loads(capsys.readouterr().out)
    assert texts["stp", "3"]["tokens"] == texts["speculative", "3"]["tokens"]
    assert (texts["speculative", "4"]["tokens"] == texts["stp", "3"]["tokens"]) == (distribution == ("--argmax",))
    assert texts["speculative", "3"]["acceptance_per_position"][0] == 1  # x_2 is the target's own


def test_generate_explains_the_two_passes_of_a_step(ptp_head, capsys):
    assert call(generate, "--prompt", "def main(", "--num-tokens", "8", "--num-drafts", "2", head=ptp_head) == 0
    assert "a step is two passes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("kind", "module", "given", "message"),
    [
        ("mtpc", generate, ["--prompt", "x", "--argmax", "--temperature", "1"], "drop one of them"),
        ("mtpc", generate, ["--prompt", "x", "--num-tokens", "0"], "allowed are 1 and above"),
        ("mtpc", generate, ["--prompt", "", "--num-tokens", "3"], "--prompt is empty"),
        ("mtpc", generate, ["--prompt", "x", "--num-tokens", "1020"], "lower --num-tokens"),
        ("mtpc", generate, ["--prompt", "x", "--num-drafts", "8"], "allowed are 1 to 7"),
        ("mtpc", generate, ["--prompt", "x", "--top-p", "2"], "top_p=2"),
        ("mtpc", command, ["--data", "nowhere.txt"], "no such file"),
        ("mtpc", command, ["--data", "nowhere.txt", "--temperature", "-1"], "temperature=-1"),
        ("mtpc", command, ["--data", "nowhere.txt", "--sequences", "0"], "allowed are 1 and above"),
        ("mtpc", command, ["--data", "nowhere.txt", "--candidates", "4"], "name a PTP head"),
        ("ptp", command, ["--data", "nowhere.txt", "--candidates", "0"], "allowed are 1 and above"),
        ("ptp", command, ["--data", "nowhere.txt", "--top-k", "-1"], "top_k=-1"),
        ("ptp", generate, ["--prompt", "x", "--num-drafts", "4"], "allowed are 1 to 3"),
        ("ptp", generate, ["--prompt", "x", "--top-k", "-2"], "top_k=-2"),
    ],
)
def test_bad_request_is_refused_in_one_line(ptp_head, kind, module, given, message):
    with pytest.raises(MtpcError, match=message) as caught:
        call(module, *given, head=ptp_head if kind == "ptp" else HEAD)
    assert "\n" not in str(caught.value)


def test_head_of_another_size_is_refused(ptp_head):
    for folder in (demo.path("cp"), Path(ptp_head)):
        with pytest.raises(UsageError, match="vocab_size=257, but target tiny has 40"):
            loading.attach(folder, llama_target(vocab_size=40))


def test_prompts_are_the_tokens_before_the_trained_ones():
    """Chat: all up to the first trained token. Text: crops, no document too short, repeated where there are too few."""
    trained = [[False] * 3 + [True] * 2, [True] * 10, [True] * 3]
    documents = Documents.join([(np.arange(100 * at, 100 * at + len(mask)), mask) for at, mask in enumerate(trained)])
    found = loading.prompts(documents, 9, 4, seed=0)
    chats = [prompt.tolist() for prompt in found if prompt[0] < 100]
    crops = [prompt.tolist() for prompt in found if prompt[0] >= 100]
    assert len(found) == 9 and len(chats) in (4, 5) and all(chat == [0, 1, 2] for chat in chats)
    assert all(len(crop) == 4 and 100 <= crop[0] <= 106 and crop == sorted(crop) for crop in crops)
    assert len({crop[0] for crop in crops}) > 1
    again = loading.prompts(documents, 9, 4, seed=0)
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    with pytest.raises(UsageError, match="no document has 11 tokens"):
        loading.prompts(Documents.join(documents[at] for at in (1, 2)), 2, 11, seed=0)


def test_head_with_draft_layers_reads_their_states():
    """Adapters that are zero leave the target's own states, so the figures are those without them."""
    from vllm_mtpc.eval.acceptance import measure
    from vllm_mtpc.eval.text import Sampling
    from vllm_mtpc.heads.adapters import DraftLayers

    loaded = loading.load(HEAD)
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
