"""Time until the app on Ray Serve starts a second engine under load, and stops it without load.

One Ray node on this machine, real engines (the demo target with the btree head), Serve's own delays unless
`--autoscaling` names others. Held against it, or exit code 1: every request is answered, and every greedy answer is
plain vLLM's token for token.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import soak
from benchmarks.nodes import PATIENCE, Nodes
from benchmarks.ray_demo import DRAFTS, ENGINE, ENVIRONMENT, TARGET, wait
from vllm_mtpc.data import prompts
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.server import Client, free_port
from vllm_mtpc.errors import EngineFailed
from vllm_mtpc.report import check_file, write_json

LONGEST_S = 900.0  # until a replica comes or goes
AFTER_S = 30.0  # of load once two engines answer


class Load:
    """Clients that send requests without a pause until they are stopped."""

    def __init__(self, client: Client, asked: list[list[int]], wanted: list[list[int]]) -> None:
        self.client, self.asked, self.wanted = client, asked, wanted
        self.is_over = threading.Event()
        self.ended: list[float] = []  # when each answer came
        self.lost: list[str] = []
        self.different = 0

    def one(self, client: int) -> None:
        index = client
        while not self.is_over.is_set():
            index = (index + 1) % len(self.asked)
            how = {"max_tokens": soak.LONGEST, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            body = {"model": TARGET, "prompt": self.asked[index], **how}
            try:
                answer = self.client.send("/v1/completions", body)
                status, text = answer.status_code, answer.text
            except EngineFailed as error:
                status, text = 0, str(error)
            self.ended.append(time.monotonic())
            if status != 200:
                self.lost.append(f"{status} {text[:200]}")
            elif json.loads(text)["choices"][0]["token_ids"] != self.wanted[index]:
                self.different += 1

    def per_second(self, begin: float, end: float) -> float:
        return round(sum(begin <= moment < end for moment in self.ended) / (end - begin), 2)


def replicas() -> tuple[int, int]:
    """Engines that answer, and all that were asked for."""
    from ray import serve

    states = serve.status().applications["default"].deployments["Engine"].replica_states
    return states.get("RUNNING", 0), sum(states.values())


def measure(nodes: Nodes, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import ray
    from ray import serve

    from vllm_mtpc.ray_serve.deployments import build
    from vllm_mtpc.ray_serve.options import parse

    asked = prompts.load([], TARGET, 32, 200, 200)
    wanted = soak.reference(TARGET, asked, folder)
    options = {"max_replicas": 2, "target_ongoing_requests": args.target, "autoscaling": args.autoscaling}
    port = free_port()
    ray.init(address=nodes.address, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    engine = {"model": TARGET, "speculative_config": DRAFTS, "env": ENVIRONMENT, **ENGINE}
    begun = time.monotonic()
    serve.run(build(parse({**engine, **options})), route_prefix="/")
    first = time.monotonic() - begun
    load = Load(Client(port, timeout_s=300), asked, wanted)
    assert replicas() == (1, 1)
    with ThreadPoolExecutor(args.clients) as pool:
        begun = time.monotonic()
        running = [pool.submit(load.one, number) for number in range(args.clients)]
        try:
            decided = wait(lambda: replicas()[1] == 2, LONGEST_S)
            ready = decided + wait(lambda: replicas()[0] == 2, LONGEST_S)
            time.sleep(AFTER_S)
        finally:
            load.is_over.set()
        for one in running:
            one.result()
    gone = wait(lambda: replicas() == (1, 1), LONGEST_S)
    serve.shutdown()
    ray.shutdown()
    return {
        "clients": args.clients,
        "options": options,
        "first_engine_s": round(first, 1),
        "second_engine_decided_s": round(decided, 1),
        "second_engine_ready_s": round(ready, 1),
        "one_engine_again_s": round(gone, 1),
        "requests": len(load.ended),
        "requests_per_second_of_one": load.per_second(begun, begun + ready),
        "requests_per_second_of_two": load.per_second(begun + ready, begun + ready + AFTER_S),
        "lost": load.lost,
        "different_from_plain": load.different,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ray_autoscaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--clients", type=int, default=8, help="at once (8)")
    parser.add_argument("--target", type=int, default=2, help="requests at an engine that are aimed at (2)")
    parser.add_argument("--autoscaling", type=json.loads, default={}, help="keys of Serve's autoscaling_config, JSON")
    parser.add_argument("--json", type=Path, help="file for the report")
    args = parser.parse_args()
    check_file(args.json)
    folder = Path(tempfile.mkdtemp(prefix="mtpc-ray-"))
    os.environ |= {**PATIENCE, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1"}
    nodes = Nodes(1, num_cpus=3)  # an engine takes one, Serve's own none
    try:
        found = measure(nodes, args, folder)
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found))
    if args.json is not None:
        write_json(args.json, {"kind": "ray autoscaling", **provenance.collect(), **found})
    return int(bool(found["lost"] or found["different_from_plain"]))


if __name__ == "__main__":
    sys.exit(main())
