"""What scripts/train_demo.sh refuses, and where it writes; its python is one that only repeats its words."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_demo.sh"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """The script, copied to a checkout of nothing else: no environment, no packaged models, nothing to train with."""
    (folder / "scripts").mkdir()
    shutil.copy(SCRIPT, folder / "scripts")
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").write_text('#!/bin/sh\necho "$@"\n')
    (folder / "bin" / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    words = ("bash", "scripts/train_demo.sh", *words)
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "foo"], "--only foo; allowed: --only target, --only text, --only heads"),
        (["--only"], "--only without a name; allowed: --only target, --only text, --only heads"),
        (["--out"], "--out needs a folder; type --out FOLDER"),
        (["--quicker"], "--quicker is not known; allowed: --only target|text|heads, --quick, --out FOLDER"),
    ],
)
def test_words_that_are_not_known_are_refused_before_training(tmp_path, words, message):
    done = run(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"train_demo.sh: {message}\n")


@pytest.mark.parametrize(
    ("words", "folder"),
    [([], "vllm_mtpc/demo/assets"), (["--quick"], "build/demo-quick"), (["--quick", "--out", "x"], "x")],
)
def test_a_try_out_does_not_replace_what_is_packaged(tmp_path, words, folder):
    done = run(tmp_path, *words, "--only", "target")
    assert done.returncode == 0, done.stderr
    assert f"-m benchmarks.demo.train_target --out {folder}/target" in done.stdout
