"""Takes the place of `vllm serve` where a test is about what happens around it: it starts in a second.

`python fake_server.py MODEL ... --uds PATH`. A completion is the prompt backwards, `max_tokens` hundredths of a second
later; "die" ends the server, "refuse" is refused. Every answer names the process.
"""

from __future__ import annotations

import asyncio
import os
import sys

from aiohttp import web

METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15.0
"""


async def complete(request: web.Request) -> web.Response:
    body = await request.json()
    prompt = body["prompt"]
    if prompt == "die":
        print("Traceback:\n" + "  a line of it\n" * 20 + "RuntimeError: killed by a request", flush=True)
        os._exit(1)
    if prompt == "refuse":
        return web.json_response({"error": {"message": "no such thing", "type": "BadRequestError"}}, status=400)
    await asyncio.sleep(body.get("max_tokens", 1) / 100)
    answer = {"process": os.getpid(), "choices": [{"text": prompt[::-1]}], "usage": {"completion_tokens": len(prompt)}}
    return web.json_response({**answer, "api_key": os.environ.get("VLLM_API_KEY")})


async def look(request: web.Request) -> web.Response:
    return web.Response(text=METRICS if request.path == "/metrics" else "")


def main(words: list[str]) -> None:
    if "broken" in words[0]:
        print("loading\nValueError: this model is broken\nbye", flush=True)
        sys.exit(1)
    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/health", look), web.get("/metrics", look)])
    web.run_app(app, path=words[words.index("--uds") + 1], print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
