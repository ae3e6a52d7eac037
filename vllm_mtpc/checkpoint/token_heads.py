"""`vllm-mtpc token-heads`: write the prediction heads that a target already has as a head folder.

EvaByte predicts eight bytes at once: rows [V i, V (i + 1)) of its lm_head are for token i + 1 after the last. They form
a fully factorised circuit of one component. Serving takes x_1 from the first, the target, and drafts from the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.checkpoint.locate import CONFIG_FILE, check_out, download, verifier_name
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_json
from vllm_mtpc.heads import build_head

if TYPE_CHECKING:
    import argparse

LM_HEAD = "lm_head.weight"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("target", metavar="TARGET", help="model with several prediction heads: folder or hub name")
    parser.add_argument("--out", metavar="OUT", type=Path, required=True, help="folder of the head")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    config = write_token_heads(args.target, args.out)
    print(f"head: {args.out} ({config.circuit}, window {config.window})")
    return 0


def write_token_heads(name: str, out: Path) -> HeadConfig:
    """Write the prediction heads of a target, a folder or hub name, to `out`; returns the head's config.

    Raises CheckpointError for a target with fewer than two.
    """
    from vllm_mtpc.checkpoint.load import Shards
    from vllm_mtpc.checkpoint.metadata import converted_card
    from vllm_mtpc.checkpoint.save import save_head

    check_out(out)
    folder = Path(name) if Path(name).is_dir() else download(name, "target")
    target: Any = read_json(folder / CONFIG_FILE)
    weight = Shards(folder).read(LM_HEAD)
    hidden_size, vocab_size = target.get("hidden_size"), target.get("vocab_size")
    is_matrix = weight.dim() == 2 and type(vocab_size) is int and vocab_size > 0
    heads = len(weight) // vocab_size if is_matrix else 0
    if heads < 2 or tuple(weight.shape) != (heads * vocab_size, hidden_size):
        found = f"{'x'.join(map(str, weight.shape))} with vocab_size={vocab_size}, hidden_size={hidden_size}"
        raise CheckpointError(f"{name}: {LM_HEAD} is {found}; allowed: 2 or more times vocab_size rows; train a head")
    verifier = verifier_name(name, out)
    config = HeadConfig.create(circuit="ff", window=heads, num_components=1, target=target, verifier=verifier)
    head = build_head(config)
    head.load_state_dict({"leaf_weight": weight.view(heads, 1, vocab_size, hidden_size)})
    provenance = {"command": f"vllm-mtpc token-heads {name} --out {out}"}
    card = converted_card(config, f"{config.circuit} head of {heads} prediction heads", f"{LM_HEAD} of {verifier}")
    save_head(out, config, head, provenance, card, weight.dtype)
    return config
