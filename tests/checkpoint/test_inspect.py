"""`vllm-mtpc inspect` reports the content of a head as JSON and as a table."""

from __future__ import annotations

import json

import pytest

from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.cli import main
from vllm_mtpc.eval.inspect_command import served_memory

# leaves n r V D, root r D, and two pairs below the root with r r D weights and r r biases each
PARAMETERS = 4 * 2 * 7 * 4 + 2 * 4 + 2 * 2 * 2 * 4 + 2 * 2 * 2


@pytest.fixture
def show(capsys):
    """Standard output of `inspect` on a path."""

    def run(*argv) -> str:
        assert main(["inspect", *map(str, argv)]) == 0
        return capsys.readouterr().out

    return run


def test_report_and_table_have_the_content_of_the_files(folder, show):
    report = inspect_head(folder)
    expected = {"path": str(folder), "circuit": "btree", "window": 4, "num_components": 2, "drafts_per_step": 3}
    expected |= {"draft_sample_method": "probabilistic", "head": "linear", "vocab_size": 7, "hidden_size": 4}
    expected |= {"format_version": 2, "trained_sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}}
    assert {key: report[key] for key in expected} == expected
    assert report["parameters"] == PARAMETERS
    weights = report["weights"]
    assert weights["check"] == "ok" and weights["dtypes"] == ["F16"]
    assert weights["bytes"] == (folder / "model.safetensors").stat().st_size
    assert weights["tensors"]["leaf_weight"] == {"shape": [4, 2, 7, 4], "dtype": "F16"}
    assert set(weights["tensors"]) == {"leaf_weight", "root_weight", "inner_weight", "inner_bias"}
    assert report["provenance"]["command"] == "train me"
    assert json.loads(show(folder, "--json")) == inspect_head(folder)
    text = show(folder)
    shown = ["btree", "probabilistic", "linear", str(PARAMETERS), "F16", "train me", "../target", "LlamaForCausalLM"]
    shown += ["not found", "top-k off", "top-p off", "temperature 1.0"]
    assert [words for words in shown if words not in text] == []
    assert text.splitlines()[-1].startswith("weights: ok (4 tensors")


def test_relative_target_is_resolved_next_to_the_head(folder):
    place = folder.parent / "target"
    expected = {"name_or_path": "../target", "resolved": str(place.resolve()), "architectures": ["LlamaForCausalLM"]}
    assert inspect_head(folder)["target"] == expected | {"found": False}
    place.mkdir()
    assert inspect_head(folder)["target"] == expected | {"found": True}


@pytest.mark.parametrize("name, found", [("org/model", None), ("gpt2", None), ("/nowhere/model", False)])
def test_other_targets_and_trained_sampling_are_shown(tmp_path, new_head, show, name, found):
    sampling = {"trained_temperature": 0.7, "trained_top_k": 40, "trained_top_p": 0.9}
    save_head(tmp_path, *new_head(verifier=name, **sampling), {}, "card")
    assert "temperature 0.7, top-k 40, top-p 0.9" in show(tmp_path)
    target = inspect_head(tmp_path)["target"]
    assert (target["resolved"], target["found"]) == (name, found)


def test_tokens_per_step_come_first(folder, show):
    figures = {"t1": {"tokens_per_step": 2.7, "per_position": [0.9, 0.8]}, "t0": {"per_position": [1.0, 0.875]}}
    record = {"commit": "abc", "figures": figures, "run": {"steps": 77}, "data": {"names": ["a.txt", "b.txt"]}}
    (folder / "provenance.json").write_text(json.dumps(record))
    lines = show(folder).splitlines()
    assert "tokens/step" in lines[2] and "2.70 at T=1.0, 2.88 at T=0" in lines[2].replace("T=1,", "T=1.0,")
    assert "accepted, T=1" in lines[3] and "up to 1: 90%, up to 2: 80%" in lines[3]
    text = "\n".join(lines)
    for words in ["77", "a.txt, b.txt", "abc"]:
        assert words in text
    assert "figures" not in text and "per_position" not in text  # no raw keys
    assert inspect_head(folder)["tokens_per_step"] == {"t1": pytest.approx(2.7), "t0": 2.875}


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "not measured; type: vllm-mtpc eval"),
        (None, "no provenance.json"),
        (b"{", "unreadable"),
        (b"[1]", "unreadable"),
        (b'{"commit": NaN}', "NaN"),
    ],
)
def test_head_with_damaged_provenance_is_shown(folder, show, content, words):
    (folder / "provenance.json").unlink()
    if content is not None:
        (folder / "provenance.json").write_bytes(content)
    assert words in show(folder)
    json.loads(show(folder, "--json"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_text_from_files_cannot_control_the_terminal(folder, show):
    (folder / "provenance.json").write_text(json.dumps({"command": "[red]x[/nope] \x1b[2J \ud800 \n next"}))
    text = show(folder)
    assert "[red]x[/nope]" in text
    assert "\x1b" not in text
    assert r"\x1b[2J \ud800   next" in text


def test_memory_before_start(folder, show, capsys):
    memory = json.loads(show(folder, "--json", "--max-num-seqs", 64))["memory"]
    assert (memory["max_num_seqs"], memory["tensor_parallel_size"]) == (64, 1)
    found = served_memory(folder, 2**16, 1)
    # per request: slot, seed, temperature, row, token, position, state; per draft: token, confidence, conditional
    row = 8 + 8 + 4 + 3 * 8 + 4 * 2 + 3 * (8 + 4 + 7 * 2)
    assert found["buffers_mib"] == round(2**16 * row / 2**20, 1)
    assert found["weights_mib"] == round(2 * PARAMETERS / 2**20, 1)
    text = show(folder, "--max-num-seqs", 64, "--tensor-parallel-size", 2)
    assert "max num seqs 64, tensor parallel size 2" in " ".join(text.replace("│", " ").split())
    assert main(["inspect", str(folder), "--max-num-seqs", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--max-num-seqs" in line


def test_other_heads_are_shown(tmp_path, save_kind, show):
    save_kind(tmp_path / "shared", "mtpc", circuit="cp", head="shared", expander_rank=5)
    assert inspect_head(tmp_path / "shared")["expander_rank"] == 5 and "expander rank" in show(tmp_path / "shared")
    save_kind(tmp_path / "ptp", "ptp", u_embedding="arithmetic-mlp", u_hidden=3, accepted=[0.5, 0.25, 0.25, 0.0])
    report = inspect_head(tmp_path / "ptp")
    lora = 3 * 2 * sum([8 + 8, 8 + 4, 8 + 4, 8 + 8, 8 + 12, 8 + 12, 12 + 8])  # rank 2 on three layers
    expected = {"method": "ptp", "variant": "o-ptp", "window": 4, "drafts_per_step": 3, "u_embedding": "arithmetic-mlp"}
    expected |= {"u_features": 32, "u_hidden": 3, "accepted": [0.5, 0.25, 0.25, 0.0]}
    expected |= {"parameters": lora + 32 * 3 + 3 + 3 * 8 + 8}
    assert {key: report[key] for key in expected} == expected
    assert (report["adapters"]["layers"], report["adapters"]["parameters"]) == ([0, 1, 2], lora)
    tensors = report["weights"]["tensors"].keys()
    assert {"inner.weight", "outer.bias"} <= tensors and len(tensors) == 46
    save_kind(tmp_path / "late", "late", late_width=5)
    text = " ".join((show(tmp_path / "ptp") + show(tmp_path / "late")).replace("│", " ").split())
    for words in ("window 4", "u features 32 u hidden 3", "layers 0, 1, 2, rank 2, alpha 6", "0.5, 0.25, 0.25, 0"):
        assert words in text, words
    assert "weights: ok (46 tensors" in text and "late width 5 distribution trust 0.85" in text
