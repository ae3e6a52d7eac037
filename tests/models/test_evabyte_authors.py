"""EvaByte against its authors' own code, which is read from a folder that the tester names; none of it is here.

    MTPC_EVABYTE_CODE=FOLDER pytest tests/models/test_evabyte_authors.py

FOLDER holds the Python files of a published EvaByte repository (configuration_evabyte.py, modeling_evabyte.py and what
they import). They are run, in a process of their own, on a tiny random model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.evabyte_reference import make_evabyte
from vllm_mtpc.hf import load_target

CODE = os.environ.get("MTPC_EVABYTE_CODE", "")
CLASSES = {
    "AutoConfig": "configuration_evabyte.EvaByteConfig",
    "AutoModelForCausalLM": "modeling_evabyte.EvaByteForCausalLM",
}
LENGTHS = (31, 32, 33, 100)  # within a window of 32, at its end, across it, and over several
THEIRS = """
import sys, torch
from transformers import AutoModelForCausalLM
folder, texts, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
with torch.no_grad():
    torch.save([model(input_ids=text[None], use_cache=False).logits[0] for text in torch.load(texts)], out)
"""


@pytest.mark.skipif(not CODE, reason="MTPC_EVABYTE_CODE names no folder with the authors' Python files")
def test_logits_are_those_of_the_authors_code(tmp_path: Path) -> None:
    make_evabyte(tmp_path / "ours")
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    for file in Path(CODE).glob("*.py"):
        shutil.copy(file, tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text()) | {"auto_map": CLASSES}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    texts = [torch.randint(64, 320, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    torch.save(texts, tmp_path / "texts.pt")
    words = [tmp_path / "theirs", tmp_path / "texts.pt", tmp_path / "logits.pt"]
    subprocess.run([sys.executable, "-c", THEIRS, *map(str, words)], check=True)
    target = load_target(tmp_path / "ours", torch.float32)
    for text, theirs in zip(texts, torch.load(tmp_path / "logits.pt"), strict=True):
        ours = target.hidden(text[None])[0] @ target.unembedding.T  # [L, 8 V]; theirs may be of the first head alone
        torch.testing.assert_close(ours[:, : theirs.shape[-1]], theirs, rtol=1e-3, atol=1e-3)
