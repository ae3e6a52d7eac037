"""Takes the place of `vllm serve` where a test is about what happens around it: it starts in a second.

`python fake_server.py MODEL ... --uds PATH`. A completion is the prompt backwards, `max_tokens` hundredths of a second
later; "die" ends the server, "hang" is never answered, "refuse" is refused. Every answer names the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from aiohttp import web

METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15.0
"""


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    prompt = body["prompt"]
    if prompt == "die":
        os._exit(1)
    if prompt == "hang":
        await asyncio.sleep(1000)
    if prompt == "refuse":
        return web.json_response({"error": {"message": "no such thing", "type": "BadRequestError"}}, status=400)
    seconds = body.get("max_tokens", 1) / 100
    answer = {"process": os.getpid(), "choices": [{"text": prompt[::-1]}], "usage": {"completion_tokens": len(prompt)}}
    answer |= {"token": request.headers.get("Authorization"), "api_key": os.environ.get("VLLM_API_KEY")}
    if not body.get("stream"):
        await asyncio.sleep(seconds)
        return web.json_response(answer, headers={"X-Request-Id": request.headers.get("X-Request-Id", "none")})
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
        return web.Response(text=METRICS if request.path == "/metrics" else str(os.getpid()))

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/health", look), web.get("/metrics", look)])
    web.run_app(app, path=words[words.index("--uds") + 1], print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
