"""`vllm serve` whose engine is a fork: vLLM spawns it on a CPU, which imports all of vLLM again, 15 CPU-seconds."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

PROGRAM = (sys.executable, "-m", "tests.support.serve", "serve")  # in the place of `vllm_mtpc.engine.server.PROGRAM`


def main() -> None:
    from vllm.entrypoints.cli.main import main as vllm

    get_context: Any = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)
    vllm()


if __name__ == "__main__":
    main()
