"""Arguments that the commands of this package share; imports nothing that is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from vllm_mtpc.config.mtpc import HeadConfig
    from vllm_mtpc.config.ptp import PtpConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_head(parser: argparse.ArgumentParser) -> None:
    """A head, its target, and where and in what the target computes."""
    parser.add_argument("head", metavar="HEAD", help="head folder, target folder that ships mtpc/, or hub name")
    parser.add_argument("--target", metavar="MODEL", help="folder or hub name (default: the head's own verifier)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="the target computes in (default: its own)")


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises UsageError unless every one of these that is given is 1 or more."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value}: allowed are 1 and above; give it a positive number")


def sampling_defaults(args: argparse.Namespace, config: HeadConfig | PtpConfig) -> None:
    """Fills in temperature (one or several), top_k and top_p where they were not given.

    Circuits: 1 (and 0), both off. PTP heads: what they were trained for (and 0), as u means other tokens elsewhere.
    """
    trained = (1.0, 0, 1.0)
    if config.speculators_model_type == "ptp":
        trained = (config.trained_temperature, config.trained_top_k, config.trained_top_p)
    if args.temperature is None:
        args.temperature = [trained[0], 0.0]
    args.top_k = trained[1] if args.top_k is None else args.top_k
    args.top_p = trained[2] if args.top_p is None else args.top_p
