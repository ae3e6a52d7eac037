"""Stream a completion step by step from a server with vLLM's OpenAI API.

vLLM sends a chunk per step of a request, so a chunk of k tokens has k - 1 accepted drafts and one token of the target.
A busy server joins chunks, and the live numbers are then too high. A server with --per-request-spec-decode-metrics
summary reports the exact counts at the end.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
from pydantic import BaseModel, Field

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.errors import EngineFailed, printable

HEADERS_S = 30.0  # longest wait for a connection


class Chosen(BaseModel):
    """A head, by its index in the page's list."""

    head: int = Field(ge=0)


class Asked(Chosen):
    """A request of the page; `drafts`: maximum per step (None: the server's); `chat`: use the chat template."""

    prompt: str
    temperature: float = Field(ge=0, allow_inf_nan=False)
    max_tokens: int = Field(ge=1)
    seed: int | None = None
    drafts: int | None = Field(None, ge=0)
    chat: bool = False

    def request(self, model: str) -> tuple[str, dict[str, Any]]:
        """Return the path and body for the API."""
        body: dict[str, Any] = {"model": model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}  # with the counts
        if self.seed is not None:
            body["seed"] = self.seed
        if self.drafts is not None:
            body["vllm_xargs"] = {"mtpc_drafts": self.drafts}
        if self.chat:
            messages = [{"role": "user", "content": self.prompt}]
            return "/v1/chat/completions", body | {"messages": messages, "logprobs": True, "top_logprobs": 0}
        return "/v1/completions", body | {"prompt": self.prompt, "logprobs": 0}


class Step(NamedTuple):
    """One chunk: its tokens as text (one piece if they cannot be separated), their number, ms since the request."""

    pieces: list[str]
    tokens: int
    ms: float


class Counted(NamedTuple):
    """The server's counts of an answer: steps of the target, and accepted drafts by position."""

    steps: int
    accepted: list[int]


@contextlib.asynccontextmanager
async def answer(session: aiohttp.ClientSession, url: str, **more: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer to a POST of `json`, or to a GET without it.

    Raises:
        EngineFailed: the server does not answer, or with an error, or not as vLLM does.
    """
    try:
        async with session.request("POST" if "json" in more else "GET", url, **more) as response:
            if response.status != 200:
                raise EngineFailed(f"{url} answers {response.status}: {_message_of(await response.text())}")
            yield response
    except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
        raise EngineFailed(f"{url} does not answer as vLLM's OpenAI API: {error or type(error).__name__}") from None


async def steps(session: aiohttp.ClientSession, url: str, model: str, asked: Asked) -> AsyncIterator[Step | Counted]:
    """Yield the steps of one answer, then the server's counts if it has them. Raises EngineFailed."""
    path, body = asked.request(model)
    started, counted = time.perf_counter(), 0
    async with answer(session, url + path, json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise EngineFailed(f"{url}: {event['error'].get('message', event['error'])}")
            if of_request := (event.get("metrics") or {}).get("speculative_decoding"):
                by_count = of_request["acceptance_histogram"]  # of steps with drafts
                accepted = [sum(by_count[k:]) for k in range(1, len(by_count))]
                yield Counted(counted - sum(accepted), accepted)
            for choice in event["choices"]:
                if tokens := len(choice.get("token_ids") or ()):
                    yield Step(_pieces_of(choice, tokens), tokens, 1000 * (time.perf_counter() - started))
                counted += tokens


def _pieces_of(choice: dict[str, Any], tokens: int) -> list[str]:
    """Return the chunk's text token by token if the server separates it, else in one piece."""
    text: str = choice.get("text") or choice.get("delta", {}).get("content") or ""
    logprobs = choice.get("logprobs") or {}
    pieces = logprobs.get("tokens") or [one["token"] for one in logprobs.get("content") or []]
    if len(pieces) == tokens and "".join(pieces) == text:
        return pieces
    return list(text) if len(text) == tokens else [text]


def _message_of(text: str) -> str:
    with contextlib.suppress(LookupError, TypeError, ValueError):
        text = str(json.loads(text)["error"]["message"])
    return printable(" ".join(text.split()), 400)


async def model_of(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the model of a server: {"id", "max_model_len" on vLLM}. Raises EngineFailed."""
    async with answer(session, url + "/v1/models") as response:
        found: dict[str, Any] = (await response.json())["data"][0]
        return found | {"id": str(found["id"])}


async def drafts_of(session: aiohttp.ClientSession, url: str) -> int | None:
    """Return the maximum number of drafts per step by the server's counters; None: no drafts, or no counters."""
    found: tuple[int, ...] = ()
    with contextlib.suppress(EngineFailed):
        async with answer(session, url + "/metrics") as response:
            found = Acceptance.read(await response.text()).accepted_per_position
    return len(found) or None
