"""provenance.json, the model card made from it, and the table of options in the docs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.files import row
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
    head = {"circuit": "btree", "window": 4, "num_components": 32, "drafts": 3}
    head |= {"trunk": options.trunk.get("kind", "none"), "leaves": "own", "draft_vocab_size": options.draft_vocab_size}
    return provenance(options, head, options.verifier or options.target, figures, run)


def test_record_repeats_the_run_and_has_no_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    target, words = str(tmp_path / "target"), ["--target", f"{tmp_path}/target", f"--out={tmp_path}/head", "/etc/x y"]
    monkeypatch.setattr(sys, "argv", [f"{tmp_path}/bin/vllm-mtpc", "train", *words])
    named = {"target": target, "data": ["/etc/x y"], "cache": "/var/states", "verifier": target}
    record = make(tmp_path, {"t1": T1}, RUN, **named, seed=7)
    assert record["command"] == "vllm-mtpc train --target target --out=head 'x y'"
    assert record["seed"] == 7 and record["figures"] == {"t1": T1} and record["run"]["steps"] == 1300
    assert record["data"] == {"names": ["x y"], "tokens": 54321, "documents": 9, "sha256": "ab" * 32}
    assert set(TrainOptions.model_fields) <= set(record["settings"]) and {"commit", "hardware"} <= set(record)
    for text in (json.dumps(record), head_card(record)):
        assert str(tmp_path) not in text and "/etc" not in text and "/var" not in text
    assert (record["head"]["base_model"], make(tmp_path, {}, RUN)["head"]["base_model"]) == (None, "org/model")


ROWS = [  # of a measured head's card
    "|  | T=1 | T=0 |\n", "| Tokens/step | **1.750** (s.e. 0.031) | **2.500** (s.e. 0.031) |\n",
    "| Accepted up to 1 | 0.500 | 0.800 |\n", "| Accepted up to 2 | 0.250 |  |\n",
    "| Bits per token, the head's joint | 3.250 | 3.250 |\n", "| Sequences / contexts | 6 / 123 | 6 / 123 |\n",
    "1,300 steps of 4,096 windows", "\n- Hidden states computed by transformers 5.19.0\n",
    "`a.txt`; 54,321 tokens of 9 documents, SHA-256 of the packed rows `abab",
]  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "run", "changes", "present", "absent"),
    [
        ({"t1": T1, "t0": T0}, RUN, {"components": 8}, ROWS, ["untrained", "Not measured"]),
        ({}, RUN, {}, ["**Not measured**", "head --data DATA", "](loss.png)"], ["untrained", "acceptance.png"]),
        ({}, RUN, {"trunk": "lora"}, ["trunk lora", "Model Runner V2 alone", "## Training"], []),
        ({}, RUN, {"trunk": "mlp", "draft_vocab_size": 9000}, ["trunk mlp", "9,000"], []),
        ({}, RUN | {"states": "vllm 0.32.0"}, SERVED, ['by vllm 0.32.0, engine options `{"download_dir": "hub"'], []),
        ({}, {"steps": 0}, {}, ["**This head is untrained**"], ["## Training", "| Tokens/step", "loss.png"]),
    ],
)
def test_card_shows_what_is_known(tmp_path: Path, figures, run, changes, present, absent) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "loss.png").touch()
    card = head_card(make(tmp_path, figures, run, **changes))
    assert [part for part in [*present, "\nvllm serve head\n"] if part not in card] == []
    assert [part for part in absent if part in card] == []
    words = shlex.split(next(line for line in card.splitlines() if "--speculative-config" in line))
    assert words[:3] == ["vllm", "serve", "org/model"] and json.loads(words[4]) == {"method": "mtpc", "model": "head"}


def test_docs_list_exactly_the_options(root: Path) -> None:
    text = (root / "docs" / "training.md").read_text(encoding="utf-8")
    table = text.split("## Options\n")[1].split("\n## ")[0]
    missing = [row(name) for name in TrainOptions.model_fields if row(name) not in table.splitlines()]
    assert not missing, "docs/training.md lacks these lines:\n" + "\n".join(missing)
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(TrainOptions.model_fields)
