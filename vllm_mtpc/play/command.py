"""`vllm-mtpc play`: start servers that are not running yet, and show the page."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from vllm_mtpc import demo
from vllm_mtpc.checkpoint import read_config, resolve_head, resolve_verifier
from vllm_mtpc.engine.options import API_KEY
from vllm_mtpc.engine.server import Client, run_server
from vllm_mtpc.errors import UsageError
from vllm_mtpc.play.app import Play, Side

DEMO_HEADS = ("btree", "hmm", "cp", "ff")
DEMO_ENGINE = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "256M")
PROMPTS = {True: "def read_lines(path):\n    ", False: "Write a short poem about a lighthouse."}  # of the demo or not


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", help="folder or hub name of the target (default: the packaged demo's)")
    add(
        "--head",
        action="append",
        metavar="[NAME=]HEAD",
        help="a head's folder or hub name, or the address of its server; repeatable (default: packaged heads)",
    )
    add("--plain", metavar="URL", help="the address of a server without a head (default: one is started)")
    add("--port", type=int, default=8600, help="of the page (8600)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    add("engine", nargs="*", metavar="-- FLAG", help="flags of `vllm serve` for servers that are started")


def run(args: argparse.Namespace) -> int:
    names = [parse_head(one) for one in args.head or []]
    are_urls = {is_url(head) for _, head in names}
    if len(are_urls) > 1 or (args.plain is not None) != (are_urls == {True}):
        raise UsageError(
            "--plain and --head: allowed are two addresses (--plain http://HOST:PORT --head http://HOST:PORT), or "
            "heads that are folders, without --plain; type one of these"
        )
    if are_urls == {True}:
        show(args, Play("", Side("plain", server_address(args.plain)), [Side(*one) for one in names], PROMPTS[False]))
    else:
        with run_servers(args, names) as play:
            show(args, play)
    return 0


def parse_head(text: str) -> tuple[str, str]:
    """Return (name, head) of "NAME=HEAD" or HEAD."""
    name, is_given, head = text.partition("=")
    if not is_given or "/" in name:
        name, head = "", text
    head = server_address(head) if is_url(head) else head
    return name or (urlsplit(head).netloc if is_url(head) else Path(head).name), head


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def server_address(text: str) -> str:
    """Return the address of a server without /v1; raises UsageError for other text."""
    if not is_url(text) or not urlsplit(text).netloc:
        raise UsageError(f"{text!r} is no address of a server; allowed: http://HOST:PORT; correct it")
    return text.rstrip("/").removesuffix("/v1")


@contextlib.contextmanager
def run_servers(args: argparse.Namespace, names: Sequence[tuple[str, str]]) -> Iterator[Play]:
    """Run two servers: of the target alone, and with the first head, which the page can replace by the others."""
    is_demo = args.target is None and not names
    if not names and args.target is not None:
        raise UsageError("--target without --head: name the head that is to draft for it, --head HEAD_FOLDER")
    folders = {name: resolve_head(head) for name, head in names} or {name: demo.path(name) for name in DEMO_HEADS}
    first = next(iter(folders.values()))
    config = read_config(first)
    target = args.target or str(resolve_verifier(first, config.speculators_config.verifier.name_or_path))
    engine = [*(DEMO_ENGINE if is_demo else ()), *args.engine]
    spec = {"method": config.speculators_model_type, "model": str(first)}
    drafting = ["--speculative-config", json.dumps(spec), "--per-request-spec-decode-metrics", "summary"]
    arguments = {"plain": [target, *engine], "head": [target, *engine, *drafting]}
    environment = {"MTPC_ALLOW_HEAD_SWAP": "1", "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}
    environment[API_KEY] = os.environ.get(API_KEY, "")  # the page's requests have it
    print(f"starting two servers of {target}, plain and with {first.name}; this takes a minute", flush=True)
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(name: str) -> Client:
            return stack.enter_context(run_server(arguments[name], Path(logs) / f"{name}.log", environment))

        plain, head = pool.map(start, arguments)
        sides = [Side(name, head.url, str(folder)) for name, folder in folders.items()]
        shown = "the packaged demo" if is_demo else Path(target).name
        yield Play(shown, Side("plain", plain.url), sides, PROMPTS[is_demo])


def show(args: argparse.Namespace, play: Play) -> None:
    """Serve the page until Ctrl+C."""
    from aiohttp import web

    if args.host not in ("127.0.0.1", "localhost", "::1"):
        reach = f"everyone who reaches it uses the servers with your {API_KEY}"
        print(f"warning: --host {args.host}: {reach}", file=sys.stderr)
    print(f"open http://{args.host}:{args.port} (Ctrl+C ends it)", flush=True)
    web.run_app(play.app(args.host), host=args.host, port=args.port, print=None)
