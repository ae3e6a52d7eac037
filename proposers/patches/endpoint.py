"""`POST /mtpc/head {"path": ...}` of `vllm serve`: serve another head from the next step on (worker/swap.py).

For administrators: a caller chooses files that the server reads. It requires the server's API key, which vLLM itself
checks for /v1 alone.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_mtpc import METHODS
from vllm_mtpc.errors import printable

PATH = "/mtpc/head"


class HeadEndpoint:
    """vLLM's EndpointPlugin for /mtpc/head."""

    name, required_tasks = "mtpc_head", ("generate",)

    def __init__(self) -> None:
        self.engine: Any = None
        self.guard: AuthenticationMiddleware | None = None

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route(PATH, self.swap, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        self.engine = engine_client
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        self.guard = AuthenticationMiddleware(None, keys) if keys else None

    async def swap(self, request: Request) -> JSONResponse:
        if self.guard is not None and not self.guard.verify_token(request.headers):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        # vLLM allows every web page to send JSON (CORS); browsers add the origin, and a page does not have the key
        if self.guard is None and "origin" in request.headers:
            return refused(f"{PATH} takes no requests of web pages without an API key; use curl", 403)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return refused(f"{PATH} takes JSON; add the header Content-Type: application/json", 415)
        path = None
        with suppress(ValueError, KeyError, TypeError):
            path = (await request.json())["path"]
        if not isinstance(path, str) or not path:
            return refused(f'{PATH} takes {{"path": "HEAD_FOLDER"}}, a folder on the server')
        spec = getattr(getattr(self.engine, "vllm_config", None), "speculative_config", None)
        if getattr(spec, "method", None) not in METHODS:
            return refused("no head is served here; start the server with a speculative_config of method mtpc or ptp")
        answers = await self.engine.collective_rpc("try_swap_head", args=(path,))
        if reason := next((one["error"] for one in answers if "error" in one), None):
            return refused(reason)
        return JSONResponse(answers[-1])


def refused(message: str, code: int = 400) -> JSONResponse:
    """Return an error reply in the form of vLLM's."""
    body = {"message": printable(message, 1000), "type": "BadRequestError", "code": code}
    return JSONResponse({"error": body}, status_code=code)
