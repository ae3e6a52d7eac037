"""An OpenAI-compatible app for Ray Serve: replicas of `vllm serve` behind one address, with drafts.

    serve run vllm_mtpc.ray_serve:app model=TARGET speculative-config='{"method": "mtpc", "model": "HEAD"}' replicas=2

The keys of `app` are in options.py; every other key is a flag of `vllm serve`. Ray's LLM library is not used: it
returns an error for requests of a replica that died, and this app sends them to another replica.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import MtpcError

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: dict[str, Any]) -> Application:
    """Return the app for `serve run` and `serve deploy`; errors about options are one line."""
    from vllm_mtpc.ray_serve.deployments import build
    from vllm_mtpc.ray_serve.options import parse

    try:
        return build(parse(arguments))
    except MtpcError as error:
        if Path(sys.argv[0]).name == "serve" and "run" in sys.argv:  # it prints the traceback of every Exception
            raise SystemExit(f"vllm_mtpc.ray_serve: error: {error}") from None
        raise
