"""Stream a completion step by step from a server with vLLM's OpenAI API.

vLLM sends a chunk per step of a request, so a chunk of k tokens has k - 1 accepted drafts and one token of the target.
A busy server joins chunks, and the live numbers are then too high. A server with --per-request-spec-decode-metrics
summary reports the exact counts at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
from pydantic import BaseModel, Field

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

    @classmethod
    def of(cls, tokens: int, metrics: dict[str, Any]) -> Counted:
        """Return the counts of vLLM's metrics of speculative decoding, which leave out steps without drafts."""
        by_count = metrics["acceptance_histogram"]
        accepted = [sum(by_count[k:]) for k in range(1, len(by_count))]
        return cls(tokens - sum(accepted), accepted)


async def steps(session: aiohttp.ClientSession, url: str, model: str, asked: Asked) -> AsyncIterator[Step | Counted]:
    """Yield the steps of one answer, then the server's counts if it has them. Raises EngineFailed."""
    path, body = asked.request(model)
    started, counted = time.perf_counter(), 0
    try:
        async with session.post(url + path, json=body) as response:
            if response.status != 200:
                raise EngineFailed(f"{url} answers {response.status}: {message_of(await response.text())}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise EngineFailed(f"{url}: {event['error'].get('message', event['error'])}")
                if of_request := (event.get("metrics") or {}).get("speculative_decoding"):
                    yield Counted.of(counted, of_request)
                for choice in event["choices"]:
                    if tokens := len(choice.get("token_ids") or ()):
                        yield Step(pieces_of(choice, tokens), tokens, 1000 * (time.perf_counter() - started))
                    counted += tokens
    except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as error:
        raise EngineFailed(f"{url} does not answer: {error or type(error).__name__}") from None


def pieces_of(choice: dict[str, Any], tokens: int) -> list[str]:
    """Return the chunk's text token by token if the server separates it, else in one piece."""
    text: str = choice.get("text") or choice.get("delta", {}).get("content") or ""
    logprobs = choice.get("logprobs") or {}
    pieces = logprobs.get("tokens") or [one["token"] for one in logprobs.get("content") or []]
    if len(pieces) == tokens and "".join(pieces) == text:
        return pieces
    return list(text) if len(text) == tokens else [text]


def message_of(text: str) -> str:
    """Return the message of an error of the API."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return printable(" ".join(text.split()), 400)


async def model_of(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the model of a server: {"id", "max_model_len" on vLLM}. Raises EngineFailed."""
    try:
        async with session.get(url + "/v1/models") as response:
            if response.status != 200:
                raise EngineFailed(f"{url} answers {response.status}: {message_of(await response.text())}")
            found: dict[str, Any] = (await response.json())["data"][0]
            return found | {"id": str(found["id"])}
    except (aiohttp.ClientError, TimeoutError, OSError, KeyError, IndexError, ValueError) as error:
        raise EngineFailed(f"{url} is no server with vLLM's OpenAI API: {error or type(error).__name__}") from None


async def has_chat_template(session: aiohttp.ClientSession, url: str, model: str) -> bool:
    """Return whether vLLM renders a message for this model; False for servers without vLLM's /tokenize."""
    body = {"model": model, "messages": [{"role": "user", "content": "a"}]}
    async with session.post(url + "/tokenize", json=body) as response:
        return response.status == 200


async def drafts_of(session: aiohttp.ClientSession, url: str) -> int | None:
    """Return the maximum number of drafts per step by the server's counters; None: no drafts, or no counters."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        async with session.get(url + "/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    found = {one.labels["position"] for family in families for one in family.samples if one.name == name}
    return len(found) or None
