"""A training run at a size a test can afford, from documents in memory."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from accelerate import Accelerator

from vllm_mtpc.cli import main
from vllm_mtpc.data.rows import pack
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.hf import Target
from vllm_mtpc.train.options import TrainOptions, parse
from vllm_mtpc.train.trainer import METRICS_FILE, Trainer, read_metrics

V = 12
BACKBONE = {
    "trunk": {"kind": "backbone", "layers": 1, "width": 32}, "leaves": {"kind": "lm_head", "component_rank": 4},
    "beta": 1.0, "acceptance": 0.9, "train_first": False,
}  # fmt: skip
PTP = {"head": "ptp", "lora_rank": 4, "windows_per_step": 32}
LATE = {"variant": "late", "late_width": 6}
PTP_CASES = {
    name: PTP | own
    for name, own in {
        "ce": {},
        "bce": {"ptp_loss": "bce"},
        "kl": {"variant": "c-ptp"},
        "reverse-kl": {"variant": "c-ptp", "ptp_loss": "reverse-kl", "top_k": 6},
        "inverse": {"variant": "c-ptp", "ptp_loss": "inverse"},
        "baseline": {"variant": "independent"},
        "late": LATE,
        "trust": LATE | {"distribution_trust": 0.8, "ptp_loss": "ce"},
        "own": {"proposals": "student", "temperature": 0.8},
        "own c-ptp": {"proposals": "student", "variant": "c-ptp"},
        "bf16": {"precision": "bf16"},
    }.items()
}


def flags(place: Path, out: str, **changes: object) -> list[str]:
    """Flags of a small run; those that are None or False are left out."""
    values = {
        "target": place / "target", "data": place / "text.jsonl", "out": place / out, "circuit": "btree", "window": 4,
        "components": 2, "max_steps": 4, "windows_per_step": 64, "seq_len": 64, "log_every": 1, "learning_rate": 1e-2,
        "evaluation_sequences": 4, "evaluation_tokens": 12, "device": "cpu", "block_rows": 6,
    }  # fmt: skip
    if changes.get("head") == "ptp":
        values |= {"circuit": None, "components": None}
    words = []
    sections = {name: value for name, value in changes.items() if isinstance(value, dict)}
    for name, section in sections.items():  # --trunk KIND --trunk.OPTION VALUE
        changes |= {f"{name}.{key}": value for key, value in section.items() if key != "kind"} | {
            name: section.get("kind")
        }
    for name, value in (values | changes).items():
        if value is not None and value is not False:
            flag = "--" + name.replace("_", "-")
            words += [flag] if value is True else [flag, str(value)]
    return words


def train(place: Path, out: str, draws: bool = False, **changes: object) -> Path:
    """The folder of a finished run. draws: with its figures, which take a second."""
    figures = {} if draws else {"plot_loss": mock.DEFAULT, "plot_acceptance": mock.DEFAULT}
    with mock.patch.multiple("vllm_mtpc.train.trainer", **figures) if figures else nullcontext():
        assert main(["train", *flags(place, out, **changes)]) == 0
    return place / out


def refused(capsys: pytest.CaptureFixture[str], place: Path, out: str, **changes: object) -> str:
    capsys.readouterr()
    assert main(["train", *flags(place, out, **changes)]) in (1, 2)
    return capsys.readouterr().err.strip().splitlines()[-1]


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "provenance.json").read_text())


def random_documents(count: int = 30, seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, V, n), np.ones(n, bool)) for n in rng.integers(5, 40, count)]


def options_for(target: Target, out: Path, **changes) -> TrainOptions:
    values = {
        "target": target.name, "data": ["none"], "out": out, "window": 4, "max_steps": 12, "windows_per_step": 64,
        "seq_len": 40, "log_every": 1, "save_minutes": 60, "learning_rate": 1e-2, "block_rows": 5,
    }  # fmt: skip
    if changes.get("head") != "ptp":
        values |= {"circuit": "btree", "components": 3, "beta": 0.0, "acceptance": 0.0, "train_first": True}
    return parse(values | changes)


def make_trainer(options: TrainOptions, target: Target, documents: Documents | None = None) -> Trainer:
    rows, _ = pack(documents or random_documents(), options.seq_len, options.window, options.seed)
    trainer = options.trainer(options, target, Accelerator(cpu=True))
    trainer.setup(rows)
    return trainer


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out / METRICS_FILE)]
