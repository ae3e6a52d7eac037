"""Entry point of the vLLM plugin (group `vllm.general_plugins`)."""

from __future__ import annotations

import logging


def register() -> None:
    """Install the vLLM patches and the models; vLLM calls this in every process, possibly more than once.

    Never raises: an exception would end every vLLM process of the environment, also those without a head. Errors are
    logged, and reported when a head is loaded.
    """
    try:
        from vllm_mtpc.models import registration
        from vllm_mtpc.proposers.patches import install

        install()
        registration.register()
    except Exception:
        logging.getLogger("vllm.mtpc").exception("vllm_mtpc could not be set up; vLLM continues without it")
