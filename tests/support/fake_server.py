"""Takes the place of `vllm serve` where a test is about what happens around it: it starts in a second.

`python fake_server.py MODEL ... --uds PATH`. A completion is the prompt backwards, `max_tokens` hundredths of a second
later; "die" ends the server, "hang" is never answered, "refuse" is refused. Every answer names the process; /metrics
counts what was asked. After SIGTERM it aborts what it has and is given, as vLLM does, and ends seconds later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys

from aiohttp import web

METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15.0
# HELP fake:asked_total Completions that were asked for.
# TYPE fake:asked_total counter
fake:asked_total{engine="0"} %d
"""
asked, stopping, STOP_S = 0, asyncio.Event(), 3.0


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    prompt = body["prompt"]
    global asked
    asked += 1
    if prompt == "die":
        print("Traceback:\n" + "  a line of it\n" * 20 + "RuntimeError: killed by a request", flush=True)
        os._exit(1)
    if prompt == "hang":
        await asyncio.sleep(1000)
    if prompt == "refuse":
        return web.json_response({"error": {"message": "no such thing", "type": "BadRequestError"}}, status=400)
    seconds = body.get("max_tokens", 1) / 100
    answer = {"process": os.getpid(), "choices": [{"text": prompt[::-1]}], "usage": {"completion_tokens": len(prompt)}}
    answer |= {"token": request.headers.get("Authorization"), "api_key": os.environ.get("VLLM_API_KEY")}
    if not body.get("stream"):
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopping.wait(), seconds)
            answer["choices"] = [{"text": "", "finish_reason": "abort"}]
        text = json.dumps(answer, separators=(",", ":"))
        return web.json_response(text=text, headers={"X-Request-Id": request.headers.get("X-Request-Id", "none")})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for letter in prompt:
        event = {"process": os.getpid(), "choices": [{"text": letter}]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await asyncio.sleep(seconds)
    await response.write(b"data: [DONE]\n\n")
    return response


def main(words: list[str]) -> None:
    if "broken" in words[0]:
        print("loading\nValueError: this model is broken\nbye", flush=True)
        sys.exit(1)

    async def look(request: web.Request) -> web.Response:
        return web.Response(text=METRICS % asked if request.path == "/metrics" else str(os.getpid()))

    def stop() -> None:
        stopping.set()
        asyncio.get_running_loop().call_later(STOP_S, os._exit, 0)

    async def on_start(app: web.Application) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)

    app = web.Application()
    app.on_startup.append(on_start)
    app.add_routes([web.post("/v1/completions", complete), web.get("/health", look), web.get("/metrics", look)])
    web.run_app(app, path=words[words.index("--uds") + 1], print=None, handle_signals=False)


if __name__ == "__main__":
    main(sys.argv[1:])
