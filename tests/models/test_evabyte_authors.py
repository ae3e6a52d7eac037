"""EvaByte against its authors' code in a folder that the environment names.

    MTPC_EVABYTE_CODE=FOLDER pytest tests/models/test_evabyte_authors.py

FOLDER holds the Python files of a published EvaByte repository (configuration_evabyte.py, modeling_evabyte.py and their
imports). They run in another process on a tiny random model.
"""

from __future__ import annotations

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
LENGTHS = (31, 32, 33, 64, 100, 256)  # within a window of 32, at its end, after it, and over several
# With their PyTorch attention, which they use without Triton.
THEIRS = """
import json, sys, torch
from safetensors.torch import load_file
sys.path.insert(0, sys.argv[1])
import code_of_authors.multibyte_decoding_evabyte
sys.modules["triton"] = None
from code_of_authors.configuration_evabyte import EvaByteConfig
from code_of_authors.modeling_evabyte import EvaByteForCausalLM
values = json.load(open(sys.argv[2] + "/config.json"))
config = EvaByteConfig(**{key: value for key, value in values.items() if key not in ("architectures", "model_type")})
precise = dict.fromkeys(("fp32_ln", "fp32_logits", "fp32_skip_add", "mixedp_attn"), True)  # of no effect in float32
config.__dict__.update(rope_scaling=None, rope_parameters=None, **precise)
model = EvaByteForCausalLM(config).float().eval()
missing = model.load_state_dict(load_file(sys.argv[2] + "/model.safetensors"), strict=False)
assert not missing.unexpected_keys and not [key for key in missing.missing_keys if "inv_freq" not in key], missing
with torch.no_grad():
    found = [model(input_ids=text[None], use_cache=False, return_all_pred_logits=True).logits[0]
             for text in torch.load(sys.argv[3])]
torch.save(found, sys.argv[4])
"""


@pytest.mark.skipif(not CODE, reason="needs the authors' Python files: set MTPC_EVABYTE_CODE to their folder")
def test_logits_are_those_of_the_authors_code(tmp_path: Path) -> None:
    make_evabyte(tmp_path)
    shutil.copytree(CODE, tmp_path / "code" / "code_of_authors", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "code" / "code_of_authors" / "__init__.py").write_text("")
    texts = [torch.randint(64, 320, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    torch.save(texts, tmp_path / "texts.pt")
    words = map(str, (tmp_path / "code", tmp_path, tmp_path / "texts.pt", tmp_path / "logits.pt"))
    subprocess.run([sys.executable, "-c", THEIRS, *words], check=True)
    target = load_target(tmp_path, torch.float32)
    for text, theirs in zip(texts, torch.load(tmp_path / "logits.pt"), strict=True):
        ours = target.hidden(text[None])[0] @ target.model.get_output_embeddings().weight.T  # [L, 8 V]
        torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=1e-3, atol=1e-3)
