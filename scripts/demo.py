"""Demo: a server with a head that continues a text, and `bench serve` of heads next to plain vLLM.

Everything that it needs is in the package. Exits with 1 if any greedy answer differs from plain vLLM's. A PTP head is
compared where Model Runner V2 runs, on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_mtpc import cli, demo
from vllm_mtpc.bench.decodings import engine_arguments
from vllm_mtpc.data import prompts
from vllm_mtpc.engine.options import serve_arguments
from vllm_mtpc.engine.server import run_server

TOKENS = 96
PASSES = ["--concurrency", "1", "16", "--prompts", "8", "--max-tokens", str(TOKENS), "--rounds", "2", "--peers"]


def answer_prompt(log: Path, on_gpu: bool) -> None:
    """Serve the target with the BTree head it names, and print how it continues a text."""
    from transformers import AutoTokenizer

    more = {"gpu_memory_utilization": 0.2} if on_gpu else {}
    engine = engine_arguments(str(demo.path("btree")), "float32", 512, 1, on_gpu, more)
    words = serve_arguments(engine)
    print(f"vllm serve {' '.join(words)}", flush=True)
    (prompt,) = prompts.held_out(1)
    with run_server(words, log) as client:
        body = {"model": client.model_card()["id"], "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        (tokens,) = client.complete(body)
    print(f"\n{prompt}|{AutoTokenizer.from_pretrained(demo.path('target')).decode(tokens)}\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__.split("\n\n")[0])
    parser.add_argument("--logs", metavar="DIR", type=Path, help="keep the engines' logs here (default: removed)")
    options = parser.parse_args(arguments)

    def run() -> int:
        with tempfile.TemporaryDirectory() as folder:
            logs = options.logs or Path(folder)
            on_gpu = torch.cuda.is_available()
            answer_prompt(logs / "serve.log", on_gpu)
            heads = [str(demo.path(name)) for name in ("btree", *(["late"] if on_gpu else []))]  # late needs V2
            return cli.main(["bench", "serve", "--heads", *heads, *PASSES, "--logs", str(logs)])

    return cli.guard("scripts/demo.sh", run)


if __name__ == "__main__":
    sys.exit(main())
