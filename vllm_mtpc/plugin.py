"""Entry point of the vLLM plugin (group `vllm.general_plugins`)."""

from __future__ import annotations

import logging


def register() -> None:
    """Install the vLLM patches and the models; called by vLLM in every process, possibly more than once.

    Never raises: an exception here would take down every vLLM process of the environment, also those
    that never heard of a head. What goes wrong is logged, and reported when a head is asked for.
    """
    try:
        from vllm_mtpc.models import registration
        from vllm_mtpc.proposers.patches import install

        install()
        registration.register()
    except Exception:
        logging.getLogger("vllm.mtpc").exception("vllm_mtpc could not be set up; vLLM goes on without it")
