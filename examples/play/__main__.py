"""`python -m examples.play` in a checkout: start a server without drafts and one with a head, and show the page."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from examples.play.app import Play
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import read_config, resolve_head, resolve_verifier
from vllm_mtpc.cli import Parser, guard
from vllm_mtpc.engine.server import API_KEY, run_server
from vllm_mtpc.errors import UsageError

DEMO_ENGINE = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "512M")
PROMPT, BYTES_PROMPT = "Write a short poem about a lighthouse.", "def read_lines(path):\n    "


def main(words: list[str] | None = None) -> int:
    parser = Parser(prog="python -m examples.play", description="Show plain vLLM and a head on a web page.")
    add = parser.add_argument
    add("--target", metavar="MODEL", help="folder or hub name (default: the target of the head)")
    add("--head", metavar="HEAD", help="folder or hub name (default: the demo's)")
    add("--port", type=int, default=8600, help="of the page (8600)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    add("engine", nargs="*", metavar="-- FLAG", help="flags of `vllm serve`")
    return guard("python -m examples.play", lambda: run(parser.parse_args(words)))


def run(args: argparse.Namespace) -> int:
    """Run two servers, of the target alone and with the head, and serve the page until Ctrl+C."""
    if args.target and not args.head:
        raise UsageError("--target without --head: name the head that is to draft for it, --head HEAD_FOLDER")
    is_bytes = not args.head and not demo.CHAT_FOLDER.exists()
    packaged = "btree" if is_bytes else demo.CHAT
    folder = resolve_head(args.head) if args.head else demo.path(packaged)
    if not args.head and not is_bytes:
        args.target = str(demo.CHAT_FOLDER)
    config = read_config(folder)
    target = args.target or str(resolve_verifier(folder, config.speculators_config.verifier.name_or_path))
    engine = [*(() if args.head else DEMO_ENGINE), *args.engine]
    spec = {"method": config.speculators_model_type, "model": str(folder)}
    drafting = ["--speculative-config", json.dumps(spec), "--per-request-spec-decode-metrics", "summary"]
    arguments = {"plain": [target, *engine], "head": [target, *engine, *drafting]}
    environment = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}
    environment[API_KEY] = os.environ.get(API_KEY, "")  # the page's requests have it
    if args.host not in ("127.0.0.1", "localhost", "::1"):
        reach = f"everyone who reaches it uses the servers with your {API_KEY}"
        print(f"warning: --host {args.host}: {reach}", file=sys.stderr)
    print(f"starting two servers of {target}, plain and with {folder.name}; this takes a minute", flush=True)
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(name: str) -> str:
            return stack.enter_context(run_server(arguments[name], Path(logs) / f"{name}.log", environment)).url

        plain, head = pool.map(start, arguments)
        play = Play(Path(target).name, plain, head, args.head or packaged, BYTES_PROMPT if is_bytes else PROMPT)
        print(f"open http://{args.host}:{args.port} (Ctrl+C ends it)", flush=True)
        web.run_app(play.app(args.host), host=args.host, port=args.port, print=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
