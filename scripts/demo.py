"""Demo: plain vLLM and vLLM with a head answer the same questions; their texts and times are compared.

SmolLM2-135M-Instruct (scripts/smollm2.sh) with the packaged head `smollm2`; where the package index was not reached,
the packaged model of bytes continues pieces of Python. Exits with 1 if an answer differs from plain vLLM's.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from vllm_mtpc import cli, demo
from vllm_mtpc.bench.serve_command import engine_arguments
from vllm_mtpc.data import prompts
from vllm_mtpc.data.sources import chat_prompt
from vllm_mtpc.engine.server import VllmServer, run_server, serve_arguments

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that checks whether a number is prime.",
    "Explain to a child in three sentences why the sky is blue.",
    "Write a short, polite mail that moves a meeting from Monday to Tuesday.",
    "List five tips for sleeping well.",
)
TOKENS = 48
ON_GPU = {"gpu_memory_utilization": 0.3}  # two servers


class Demo(NamedTuple):
    """A target, its head, and questions with their token ids."""

    target: str
    head: Path
    questions: list[tuple[str, list[int]]]

    @classmethod
    def choose(cls) -> Demo:
        if demo.CHAT_FOLDER.exists():
            tokenizer = AutoTokenizer.from_pretrained(demo.CHAT_FOLDER)
            chats = [(text, chat_prompt([{"role": "user", "content": text}], tokenizer)) for text in QUESTIONS]
            return cls(str(demo.CHAT_FOLDER), demo.path(demo.CHAT), chats)
        print("without SmolLM2: the packaged model of bytes continues pieces of Python instead", flush=True)
        pieces = [(text, list(text.encode())) for text in prompts.held_out(len(QUESTIONS))]
        return cls(str(demo.path("target")), demo.path("btree"), pieces)


def start(chosen: Demo, with_head: bool, log: Path) -> contextlib.AbstractContextManager[VllmServer]:
    """Return a server, which starts on entry."""
    on_gpu = torch.cuda.is_available()
    engine = engine_arguments(chosen.target, "float32", 512, 1, on_gpu, ON_GPU if on_gpu else {})
    if with_head:
        engine["speculative_config"] = {"method": "mtpc", "model": str(chosen.head)}
    words = serve_arguments(engine)
    print(f"vllm serve {' '.join(words)}", flush=True)
    return run_server(words, log)


def compare(chosen: Demo, logs: Path) -> int:
    """Print every answer and the times; return 1 if texts differ."""
    decode = AutoTokenizer.from_pretrained(chosen.target).decode
    seconds, tokens, same = dict.fromkeys(("plain", "head"), 0.0), 0, 0
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        found = [start(chosen, name == "head", logs / f"{name}.log") for name in seconds]
        servers = dict(zip(seconds, pool.map(stack.enter_context, found), strict=True))
        for server in servers.values():  # what happens once
            server.complete({"model": chosen.target, "prompt": chosen.questions[0][1], "max_tokens": 8})
        before = servers["head"].acceptance()
        for number, (question, prompt) in enumerate(chosen.questions):
            body = {"model": chosen.target, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            answers, took = {}, {}
            for name in sorted(servers, reverse=number % 2 == 0):  # neither always comes first
                started = time.perf_counter()
                (answers[name],) = servers[name].complete(body)
                took[name] = time.perf_counter() - started
                seconds[name] += took[name]
            is_same = answers["plain"] == answers["head"]
            same, tokens = same + is_same, tokens + len(answers["plain"])
            text = decode(answers["head"], skip_special_tokens=True)
            times = f"plain {took['plain']:.1f} s, head {took['head']:.1f} s: {took['plain'] / took['head']:.2f}x"
            print(f"\n> {question}\n{text}\n[{'the same text' if is_same else 'ANOTHER TEXT'}; {times}]", flush=True)
        counted = servers["head"].acceptance() - before
    speed = f"{seconds['plain'] / seconds['head']:.2f}x the speed of plain vLLM"
    rates = ", ".join(f"{name} {tokens / total:.1f} tok/s" for name, total in seconds.items())
    print(f"\n{same} of {len(chosen.questions)} answers are plain vLLM's, at {speed} ({rates})")
    print(f"{counted.tokens_per_step:.2f} tokens/step, T=0, one client, {chosen.target}")
    return int(same < len(chosen.questions))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__.split("\n\n")[0])
    parser.add_argument("--logs", metavar="DIR", type=Path, help="keep the engines' logs here (default: removed)")
    options = parser.parse_args(arguments)

    def run() -> int:
        with tempfile.TemporaryDirectory() as folder:
            return compare(Demo.choose(), options.logs or Path(folder))

    return cli.guard("scripts/demo.sh", run)


if __name__ == "__main__":
    sys.exit(main())
