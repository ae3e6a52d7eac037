"""Environment variables of the package, its logger, and the warning for a bundled head that is not served."""

from __future__ import annotations

import logging
import os
from pathlib import Path

AUTO = "MTPC_AUTO"  # serve a target with the head that it bundles (default: on)
REQUEST_DRAFTS = "MTPC_REQUEST_DRAFTS"  # let a request have fewer drafts than the engine makes (default: on)

logger = logging.getLogger("vllm.mtpc")


def is_on(variable: str, default: str) -> bool:
    """Return whether an environment variable is set to something else than 0, false, off or no."""
    return (os.environ.get(variable, "").strip().lower() or default) not in ("0", "false", "off", "no")


def warn(head: Path | str, error: Exception | str) -> None:
    """Log that the target is served without its bundled head."""
    text = "Serving without drafts: the head that the target bundles, %s, is not served here: %s"
    logger.warning(text, head, reason(error))


def reason(error: Exception | str) -> str:
    """Return the message of an error in one line; its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
