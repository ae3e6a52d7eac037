"""What the environment switches on and off, and the warning of a head that its target bundles and that is not
served."""

from __future__ import annotations

import logging
import os
from pathlib import Path

AUTO = "MTPC_AUTO"  # a target that bundles a head is served with it
DEBUG = "MTPC_DEBUG"  # every rank's drafts are compared; costs a meeting of the ranks per step
SWAP = "MTPC_ALLOW_HEAD_SWAP"  # `vllm serve` has POST /mtpc/head
REQUEST_DRAFTS = "MTPC_REQUEST_DRAFTS"  # a request may have fewer drafts than the engine makes
OFF = ("0", "false", "off", "no")

logger = logging.getLogger("vllm.mtpc")


def is_on(variable: str, default: str) -> bool:
    return (os.environ.get(variable, "").strip().lower() or default) not in OFF


def warn(head: Path | str, error: Exception | str) -> None:
    text = "Serving without drafts: the head that the target bundles, %s, is not served here: %s"
    logger.warning(text, head, reason(error))


def reason(error: Exception | str) -> str:
    """The message of an error in one line; its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
