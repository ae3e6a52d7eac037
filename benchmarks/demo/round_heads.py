"""Store heads in bfloat16 with few significant bits per weight, so that they compress well in the wheel, without plots.

python -m benchmarks.demo.round_heads HEAD...     rewrites tensor files and the card, adds a note to provenance.json
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from vllm_mtpc.checkpoint.load import ADAPTER_DIGEST, ADAPTER_FILES, adapter_digest
from vllm_mtpc.checkpoint.locate import U_EMBED_FILE
from vllm_mtpc.files import replace_file

BITS, PTP_BITS = 4, 5  # of the significand, the leading one included; PTP heads lose more tokens/step per bit
PLOT = re.compile(r"!\[[^]]*\]\(\w+\.png\)\n\n")
NOTE = "bfloat16, rounded to {} significant bits; the figures are of the weights before"


def round_weights(weight: Tensor, bits: int) -> Tensor:
    """Round to the nearest number of `bits` significant bits, as bfloat16."""
    mantissa, exponent = torch.frexp(weight.float())
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).to(torch.bfloat16)


def round_head(folder: Path) -> None:
    """Rewrite the tensor files of a head, adapters first: the digest of these is in the other file's metadata."""
    bits = PTP_BITS if (folder / U_EMBED_FILE).exists() else BITS
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            metadata = dict(handle.metadata() or {})
        if ADAPTER_DIGEST in metadata:
            metadata[ADAPTER_DIGEST] = adapter_digest({name: (folder / name).read_bytes() for name in ADAPTER_FILES})
        tensors = {name: round_weights(weight, bits) for name, weight in load_file(file).items()}
        replace_file(file, save(tensors, metadata=metadata))
    for suffix in ("png", "svg"):
        for file in folder.glob(f"*.{suffix}"):
            file.unlink()
    card = folder / "README.md"
    replace_file(card, PLOT.sub("", card.read_text()).encode())
    file = folder / "provenance.json"
    record = {**json.loads(file.read_text()), "plots": [], "stored": NOTE.format(bits)}
    replace_file(file, (json.dumps(record, indent=2) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heads", nargs="+", type=Path, metavar="HEAD")
    for folder in parser.parse_args().heads:
        round_head(folder)


if __name__ == "__main__":
    main()
