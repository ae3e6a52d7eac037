"""Two Ray nodes on this machine; `serve run` and `vllm-mtpc batch` on them; a node is killed while each is at work.

Held against both, or exit code 1: every request is answered, none waits longer than the app's limit, every greedy
answer is plain vLLM's token for token, and the batch has one answer per line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks import soak
from benchmarks.child_process import failure, group
from benchmarks.nodes import PATIENCE, Nodes
from vllm_mtpc import demo
from vllm_mtpc.data import prompts
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.server import Client, free_port
from vllm_mtpc.errors import EngineFailed
from vllm_mtpc.report import write_json

TARGET, HEAD = str(demo.path("target")), str(demo.path("btree"))
DRAFTS = json.dumps({"method": "mtpc", "model": HEAD})
ENGINE = {
    "dtype": "float32",
    "enforce-eager": "true",
    "max-model-len": "320",
    "max-num-seqs": "8",
    "kv-cache-memory-bytes": str(128 << 20),
    "no-enable-prefix-caching": "true",
}
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PAIRS = [f"{key}={value}" for key, value in ENGINE.items()]
ATTEMPTS = "x-vllm-mtpc-attempts"
BIN = Path(sys.executable).parent
TIMEOUT_S = 300


@contextmanager
def app(nodes: Nodes, log: Path) -> Iterator[Client]:
    """`serve run` with an engine on each node; the proxy on the head node, the one that stays."""
    port = free_port()
    environment = {**os.environ, "RAY_ADDRESS": nodes.address}
    start = [str(BIN / "serve"), "start", "--proxy-location", "HeadOnly", "--http-port", str(port)]
    started = subprocess.run([*start, "--http-host", "127.0.0.1"], env=environment, capture_output=True, text=True)
    if started.returncode:
        raise EngineFailed(f"serve start: {started.stdout[-500:]}{started.stderr[-1500:]}")
    words = ["replicas=2", f"request_timeout_s={TIMEOUT_S}", f"env={json.dumps(ENVIRONMENT)}", *PAIRS]
    run = [str(BIN / "serve"), "run", "vllm_mtpc.ray_serve:app", f"model={TARGET}", f"speculative-config={DRAFTS}"]
    client = Client(port, timeout_s=TIMEOUT_S + 30)
    with group([*run, *words], log, environment) as process:
        wait(lambda: is_healthy(client) and "is ready at" in log.read_text(), 600, process, log)
        yield client
    shutdown = [str(BIN / "python"), "-c", "from ray import serve; import ray; ray.init(); serve.shutdown()"]
    subprocess.run(shutdown, env=environment, check=True, capture_output=True)


def is_healthy(client: Client) -> bool:
    try:
        return client.send("/health", timeout_s=5).status_code == 200
    except EngineFailed:
        return False


def wait(condition: Any, seconds: float, process: Any = None, log: Path | None = None) -> float:
    """Waits for it; how long that took."""
    started = time.monotonic()
    while not condition():
        if process is not None and process.poll() is not None:
            raise failure("the process", process.returncode, log)
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"not so after {seconds} s" + (f": {log.read_text()[-2000:]}" if log else ""))
        time.sleep(0.2)
    return time.monotonic() - started


def serve_and_kill(nodes: Nodes, asked: list, wanted: list, rounds: int, clients: int, log: Path) -> dict[str, Any]:
    """All prompts `rounds` times from many clients; the node is killed after a third of the answers."""
    answers: list[tuple[int, int, str, float]] = []
    attempts: list[int] = []
    total = rounds * len(asked)
    killed: list[float] = []

    with app(nodes, log) as client:
        name = client.model_card()["id"]

        def one(number: int) -> None:
            index = number % len(asked)
            body = {"model": name, "prompt": asked[index], "max_tokens": soak.LONGEST, "temperature": 0}
            started = time.monotonic()
            with closing(HTTPConnection("127.0.0.1", client.port, timeout=client.timeout_s)) as connection:
                words = json.dumps({**body, "ignore_eos": True, "return_token_ids": True})
                connection.request("POST", "/v1/completions", words, {"Content-Type": "application/json"})
                response = connection.getresponse()
                answers.append((index, response.status, response.read().decode(), time.monotonic() - started))
                attempts.append(int(response.getheader(ATTEMPTS, "1")))

        def kill() -> None:
            wait(lambda: len(answers) >= total // 3, 600)
            killed.append(time.monotonic())
            nodes.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        started = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(one, range(total)))
        seconds = time.monotonic() - started
        killer.join()
        metrics = client.acceptance()
    failed = [text[:200] for _, status, text, _ in answers if status != 200]
    good = [(index, json.loads(text)["choices"][0]["token_ids"]) for index, status, text, _ in answers if status == 200]
    return {
        "requests": total,
        "clients": clients,
        "answered": len(good),
        "failed": failed,
        "different_from_plain": sum(tokens != wanted[index] for index, tokens in good),
        "asked_again": sum(number > 1 for number in attempts),
        "longest_wait_s": round(max(seconds_ for *_, seconds_ in answers), 1),
        "median_wait_s": round(sorted(seconds_ for *_, seconds_ in answers)[total // 2], 1),
        "seconds": round(seconds, 1),
        "tokens_per_step_of_an_engine": round(metrics.tokens_per_step, 3),
    }


def batch_and_kill(nodes: Nodes, asked: list, wanted: list, rounds: int, folder: Path) -> dict[str, Any]:
    """A job of two engines; the node dies when a quarter of the lines are answered."""
    total = rounds * len(asked)
    body = {"max_tokens": soak.LONGEST, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    lines = [json.dumps({"id": f"{n}", "prompt": asked[n % len(asked)]}) + "\n" for n in range(total)]
    (folder / "in.jsonl").write_text("".join(lines))
    out, log = folder / "out", folder / "batch.log"
    words = ["--input", str(folder / "in.jsonl"), "--output", str(out), "--model", TARGET, "--replicas", "2"]
    words += ["--speculative-config", DRAFTS, "--body", json.dumps(body), "--part-lines", "8", "--in-flight", "8"]
    words += ["--env", json.dumps(ENVIRONMENT), "--engine", *PAIRS]
    started = time.monotonic()
    with group([str(BIN / "vllm-mtpc"), "batch", *words], log, {**os.environ, "RAY_ADDRESS": nodes.address}) as process:
        wait(lambda: len(list(out.glob("part-*.jsonl"))) * 8 >= total // 4, 600, process, log)
        before = len(list(out.glob("part-*.jsonl"))) * 8
        nodes.kill()
        process.wait(timeout=900)
    if process.returncode:
        raise failure("vllm-mtpc batch", process.returncode, log)
    answers = [json.loads(line) for part in out.glob("part-*.jsonl") for line in part.read_text().splitlines()]
    printed = next((line for line in log.read_text().splitlines() if " lines answered" in line), "")
    good = {a["custom_id"]: a["response"]["body"]["choices"][0]["token_ids"] for a in answers if not a["error"]}
    return {
        "lines": total,
        "answered_before_the_kill": before,
        "answers": len(answers),
        "with_error": len(answers) - len(good),
        "different_from_plain": sum(tokens != wanted[int(name) % len(asked)] for name, tokens in good.items()),
        "seconds": round(time.monotonic() - started, 1),
        "printed": printed.rpartition(";")[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/ray_demo.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=32, help="different prompts (32)")
    parser.add_argument("--rounds", type=int, default=8, help="how often each is asked, of the app and of the job (8)")
    parser.add_argument("--clients", type=int, default=12, help="of the app, at once (12)")
    parser.add_argument("--json", type=Path, help="file for the report")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mtpc-ray-"))
    os.environ |= {**PATIENCE, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1"}
    asked = prompts.load([], TARGET, args.prompts, 200, 200)
    wanted = soak.reference(TARGET, asked, folder)
    nodes = Nodes(2, num_cpus=1)  # so an engine fits on each
    try:
        served = serve_and_kill(nodes, asked, wanted, args.rounds, args.clients, folder / "serve.log")
        print("serve run:", json.dumps(served), flush=True)
        nodes.add()
        batched = batch_and_kill(nodes, asked, wanted, args.rounds, folder)
        print("batch:", json.dumps(batched), flush=True)
    finally:
        nodes.close()
    faults = []
    if served["failed"] or served["answered"] != served["requests"] or served["different_from_plain"]:
        faults.append("serve run: a request was lost or answered otherwise")
    if batched["answers"] != batched["lines"] or batched["with_error"] or batched["different_from_plain"]:
        faults.append("batch: a line was lost, answered twice or answered otherwise")
    if args.json is not None:
        report = {"kind": "ray", **provenance.collect(), "serve_run": served, "batch": batched, "faults": faults}
        write_json(args.json, report)
    for fault in faults:
        print(f"FAULT {fault}; logs: {folder}")
    if not faults:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
