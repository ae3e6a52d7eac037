"""Arguments that the commands of this package share; imports nothing that is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from vllm_mtpc.eval.evaluator import Evaluator

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_head(parser: argparse.ArgumentParser) -> None:
    """A head and its drafts, its target, and where and in what the target computes."""
    parser.add_argument("head", metavar="HEAD", help="head folder, target folder that ships mtpc/, or hub name")
    parser.add_argument("--target", metavar="MODEL", help="folder or hub name (default: the head's own verifier)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="the target computes in (default: its own)")
    parser.add_argument("--num-drafts", type=int, metavar="K", help="drafts per step (default: as the head says)")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Top-k and top-p."""
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="of sampled text (default: 0, off; PTP heads: as trained)"
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="of sampled text (default: 1, off; PTP heads: as trained)"
    )


def fill_sampling(args: argparse.Namespace, evaluator: type[Evaluator], config: Any) -> None:
    """The family's defaults in the place of the temperature (and 0), top_k and top_p that were not given."""
    temperature, top_k, top_p = evaluator.default_sampling(config)
    args.temperature = [temperature, 0.0] if args.temperature is None else args.temperature
    args.top_k = top_k if args.top_k is None else args.top_k
    args.top_p = top_p if args.top_p is None else args.top_p
