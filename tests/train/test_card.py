"""provenance.json, the model card made from it, and the table of options in the docs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from tests.support.files import row
from vllm_mtpc.engine.provenance import public
from vllm_mtpc.train.card import head_card, provenance
from vllm_mtpc.train.options import TrainOptions, parse

T1 = {"tokens_per_step": 1.75, "standard_error": 0.0312, "per_position": [0.5, 0.25], "anywhere": 1.8125}
T1 |= {"sequences": 6, "contexts": 123, "steps": 70.5, "target_bits": 2.125, "joint_bits": 3.25}
T0 = {**T1, "tokens_per_step": 2.5, "per_position": [0.8]}
RUN = {"steps": 1300, "minutes": 3.25, "tokens": 54321, "documents": 9, "data_sha256": "ab" * 32}
RUN |= {"tokens_per_second": 5031.2, "peak_memory_bytes": 3 * 2**29, "processes": 2, "states": "transformers 5.19.0"}
SERVED = {"engine": {"tensor_parallel_size": 2, "download_dir": "/data/hub"}}


def make(tmp_path: Path, figures: dict, run: dict, **changes: object) -> dict:
    named = {"target": "org/model", "data": ["a.txt"], "out": str(tmp_path / "head"), "learning_rate": 3e-4}
    options = parse({**named, "window": 4, **changes})
    head = {"circuit": "btree", "window": 4, "num_components": options.num_components, "head": options.head}
    head |= {"drafts": 3, "lora_layers": options.lora_layers}
    return provenance(options, head, options.verifier or options.target, figures, run)


def test_record_holds_what_repeats_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/bin/vllm-mtpc", "train", "--data", "a b.txt", "--out", "/home/me/head"])
    values = json.loads(json.dumps(make(tmp_path, {"t1": T1}, RUN, seed=7)))
    assert values["command"] == "vllm-mtpc train --data 'a b.txt' --out head"
    assert values["seed"] == 7 and values["figures"] == {"t1": T1}
    assert values["data"] == {"names": ["a.txt"], "tokens": 54321, "documents": 9, "sha256": "ab" * 32}
    assert set(TrainOptions.model_fields) <= set(values["settings"])
    assert values["head"]["num_components"] == 32 and values["run"]["steps"] == 1300
    assert {"commit", "hardware"} <= set(values)
    monkeypatch.setattr(sys, "argv", ["/lib/vllm_mtpc/__main__.py", "train"])
    assert make(tmp_path, {}, RUN)["command"] == "python -m vllm_mtpc train"
    values = make(tmp_path, {}, {**RUN, "command": "vllm-mtpc train --data '/data/a b.txt'"})  # of a worker
    assert values["command"] == "vllm-mtpc train --data 'a b.txt'" and "command" not in values["run"]


def test_absolute_paths_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    target, words = str(tmp_path / "target"), ["--target", f"{tmp_path}/target", f"--out={tmp_path}/head", "/etc/x.txt"]
    monkeypatch.setattr(sys, "argv", [f"{tmp_path}/bin/vllm-mtpc", "train", *words])
    values = make(tmp_path, {"t1": T1}, RUN, target=target, data=["/etc/x.txt"], cache="/var/states", verifier=target)
    assert values["command"] == "vllm-mtpc train --target target --out=head x.txt"
    for text in (json.dumps(values), head_card(values)):
        assert str(tmp_path) not in text and "/etc" not in text and "/var" not in text
    assert public(["a/b", "../c", 3, None, "--x=1"]) == ["a/b", "../c", 3, None, "--x=1"]


def test_front_matter_has_the_keys_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def front(card: str) -> dict:
        return yaml.safe_load(card.split("---\n")[1])

    assert front(head_card(make(tmp_path, {}, RUN)))["base_model"] == "org/model"
    assert front(head_card(make(tmp_path, {}, RUN)))["tags"] == ["mtpc", "speculative-decoding"]
    (tmp_path / "org" / "model").mkdir(parents=True)  # a folder is not on the hub, whatever its name looks like
    monkeypatch.chdir(tmp_path)
    card = head_card(make(tmp_path, {}, RUN))
    assert "base_model" not in front(card) and "license" not in front(card)
    card = head_card(make(tmp_path, {}, RUN, verifier="someone/else"))  # how it is to be named
    assert front(card)["base_model"] == "someone/else"
    assert front(card)["pipeline_tag"] == "text-generation" and "model-index" not in front(card)
    (tmp_path / "org" / "model" / "README.md").write_text("---\nlicense: mit\n---\n")
    measured = ModelCard(head_card(make(tmp_path, {"t1": T1, "t0": T0}, RUN))).data
    found = [(one.metric_name, one.metric_value) for one in measured.eval_results]
    assert found == [("Tokens/step at T=1", 1.75), ("Tokens/step at T=0", 2.5)] and measured.license == "mit"


ROWS = [  # rows and sentences of a measured head's card
    "|  | T=1 | T=0 |\n", "| Tokens/step | **1.750** (s.e. 0.031) | **2.500** (s.e. 0.031) |\n",
    "| Accepted up to 1 | 0.500 | 0.800 |\n", "| Accepted up to 2 | 0.250 |  |\n",
    "| Tokens of a step started anywhere | 1.812 | 1.812 |\n", "| Bits per token, the head's joint | 3.250 | 3.250 |\n",
    "| Sequences / contexts | 6 / 123 | 6 / 123 |\n", "includes the target's own token",
    "54,321 tokens of 9 documents", "1,300 steps of 4,096 windows", "5,031 window tokens/s", "1.50 GiB", "3.2 minutes",
    "2 process(es)", "seed 0", "standard error over sequences", "\n- Hidden states computed by transformers 5.19.0\n",
    "`a.txt`; 54,321 tokens of 9 documents, SHA-256 of the packed rows `abab", "minutes on ",
]  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "run", "changes", "present", "absent"),
    [
        ({"t1": T1, "t0": T0}, RUN, {"components": 8, "beta": 0.25}, ROWS, ["untrained", "Not measured"]),
        ({}, RUN, {}, ["**Not measured**", "head --data DATA", "](loss.png)"], ["untrained", "acceptance.png"]),
        ({}, RUN, {"lora_layers": 2}, ["last 2 layers", "Model Runner V2 alone", "## Training"], []),
        (
            *({}, RUN | {"states": "vllm 0.32.0"}, SERVED),
            ['by vllm 0.32.0, engine options `{"download_dir": "hub", "tensor_parallel_size": 2}`\n'],
            ["/data"],
        ),
        ({}, {"steps": 0}, {}, ["**This head is untrained**"], ["## Training", "| Tokens/step", "loss.png"]),
    ],
)
def test_card_shows_what_is_known(tmp_path: Path, figures, run, changes, present, absent) -> None:
    assert "](loss.png)" not in head_card(make(tmp_path, {}, RUN))
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "loss.png").touch()  # of an earlier run, where nothing is trained
    card = head_card(make(tmp_path, figures, run, **changes))
    assert [part for part in [*present, "\nvllm serve head\n"] if part not in card] == []
    assert [part for part in absent if part in card] == []
    words = shlex.split(next(line for line in card.splitlines() if "--speculative-config" in line))
    assert words[:3] == ["vllm", "serve", "org/model"] and json.loads(words[4]) == {"method": "mtpc", "model": "head"}


def test_docs_list_exactly_the_options(root: Path) -> None:
    text = (root / "docs" / "training.md").read_text(encoding="utf-8")
    table = text.split("## Options\n")[1].split("\n## ")[0]
    lines = set(table.splitlines())
    missing = [row(name) for name in TrainOptions.model_fields if row(name) not in lines]
    assert not missing, "docs/training.md lacks these lines:\n" + "\n".join(missing)
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(TrainOptions.model_fields)
