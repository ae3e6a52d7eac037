"""Ray clusters of several nodes on one machine, in a folder of their own, so that tests do not find each other's."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.nodes import PATIENCE, Nodes
from vllm_mtpc.engine.server import Client, free_port

FAKE = [sys.executable, str(Path(__file__).parent / "fake_server.py")]


@contextlib.contextmanager
def cluster(count: int = 1, cpus: float = 2, gpus: float = 0, **environment: str) -> Iterator[Nodes]:
    """`count` nodes with so many CPUs and GPUs each; this process is a driver on the first one.

    environment: of all their processes.
    """
    import ray

    folder = tempfile.mkdtemp(prefix="mtpc-ray-")  # short: sockets lie in it
    environment |= {**PATIENCE, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    nodes = None
    try:
        nodes = Nodes(count, num_cpus=cpus, num_gpus=gpus)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        if nodes is not None:
            nodes.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def serving(build: Callable[[], Any], cpus: float) -> Iterator[Client]:
    """A client of the app on Ray Serve that `build` returns, on a cluster of its own."""
    from ray import serve

    port = free_port()
    with cluster(cpus=cpus):
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(build(), route_prefix="/")
        yield Client(port)
        serve.shutdown()


def ask(client: Client, prompt: str, **more) -> tuple[int, dict]:
    status, text = client.post("/v1/completions", json.dumps({"prompt": prompt, **more}).encode())
    return status, json.loads(text)
