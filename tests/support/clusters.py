"""Ray clusters of several nodes on one machine, and the files of batch jobs, for tests with a fake server."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec

from benchmarks.nodes import PATIENCE, Nodes
from vllm_mtpc.engine.server import Client, free_port

LOCAL = fsspec.filesystem("file")
FAKE = [sys.executable, str(Path(__file__).parent / "fake_server.py")]


@contextlib.contextmanager
def cluster(count: int = 1, cpus: float = 2, gpus: float = 0, **environment: str) -> Iterator[Nodes]:
    """`count` nodes with so many CPUs and GPUs each; this process is a driver on the first one.

    They have a folder of their own (a short path: sockets lie in it), so that tests do not find each other's.
    environment: of all their processes.
    """
    import ray

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mtpc-ray-", ignore_cleanup_errors=True))
        environment |= {**PATIENCE, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        stack.enter_context(mock.patch.dict(os.environ, environment))
        nodes = stack.enter_context(contextlib.closing(Nodes(count, num_cpus=cpus, num_gpus=gpus)))
        stack.callback(ray.shutdown)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes


@contextlib.contextmanager
def serving(build: Callable[[], Any], cpus: float) -> Iterator[Client]:
    """A client of the app on Ray Serve that `build` returns, on a cluster of its own."""
    from ray import serve

    port = free_port()
    with cluster(cpus=cpus):
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(build(), route_prefix="/")
        yield Client(port, timeout_s=120)
        serve.shutdown()


def ask(client: Client, prompt: str, **more) -> tuple[int, dict]:
    answer = client.send("/v1/completions", {"prompt": prompt, **more})
    return answer.status_code, answer.json()


def write_prompts(path: Any, prompts: dict[str, str], store: Any = LOCAL) -> None:
    lines = [json.dumps({"id": name, "prompt": prompt}) for name, prompt in prompts.items()]
    store.pipe_file(str(path), "\n".join(lines).encode())


def answers_of(folder: Any, store: Any = LOCAL) -> dict[str, dict]:
    """Lines of a batch job's parts by id; every part is whole, and every id has one line."""
    parts = [store.cat_file(part) for part in store.glob(f"{folder}/part-*.jsonl")]
    assert all(part.endswith(b"\n") for part in parts)
    lines = [json.loads(line) for part in parts for line in part.splitlines()]
    answers = {line["custom_id"]: line for line in lines}
    assert len(answers) == len(lines)
    return answers


def text_of(answer: dict) -> str:
    return answer["response"]["body"]["choices"][0]["text"]
