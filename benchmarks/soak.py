"""A real server under everything clients do to it, for as long as is asked: `scripts/soak.sh`.

Many clients send greedy and sampled requests, hang up in the middle of an answer, and send what no server can answer,
to a server whose KV cache is too small for them, so that requests are preempted too. Every other request sets the
number of
drafts it wants (`mtpc_drafts`). `--runner v2` serves with Model Runner V2, without a GPU interpreted, which is slow;
`--swap` changes the head every 10 s while all of this goes on. Held against the server, or exit code 1:

* every greedy answer is plain vLLM's, token for token (an offline engine without drafts has written them before);
* what cannot be answered is refused with a 4xx and a message, and nothing else ends in an error;
* every swap is answered with 200;
* memory of the server's processes does not grow: the last quarter of the time against the second (from 5 minutes on:
  before, allocators are still filling). oneDNN keeps a program for each number of rows it has multiplied, up to 1,024:
  plain vLLM grows by that as well, so here it keeps none;
* at the end the server is healthy, idle, and has given every KV block back.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.child_process import INTERPRETED
from vllm_mtpc import demo
from vllm_mtpc.checkpoint.load import read_config
from vllm_mtpc.cli import guard
from vllm_mtpc.data import prompts
from vllm_mtpc.engine import provenance, server
from vllm_mtpc.engine.served import serve
from vllm_mtpc.errors import EngineFailed
from vllm_mtpc.report import check_file, write_json

PROG = "python -m benchmarks.soak"
LONGEST = 64  # tokens of an answer
PROMPTS = 64
SEQUENCES, BLOCK, BLOCKS = 12, 32, 64  # 2048 tokens of KV cache; 12 requests of up to 264 tokens want more
SWAP_S = 10.0  # from one swap of the head to the next
GROWTH, SETTLED = 1.01, 5.0  # maximum growth of the server's memory; minutes after which it is checked
NO_CACHE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
KINDS = {"greedy": 10, "sampled": 4, "two answers": 1, "logprobs": 2, "hangs up": 4, "refused": 2}
SERVER = {
    "dtype": "float32",
    "max-model-len": 320,
    "max-num-seqs": SEQUENCES,
    # a step's budget: V1 on a CPU cannot read a seeded prompt in chunks, with or without drafts
    "max-num-batched-tokens": 4096,
    "block-size": BLOCK,
    "num-gpu-blocks-override": BLOCKS,
    "kv-cache-memory-bytes": 64 << 20,
}


@dataclass
class Tally:
    """What happened so far, of all clients."""

    answered: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)  # seconds, bytes of each process
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, fault: str | None) -> None:
        with self.lock:
            self.answered[kind] += 1
            if fault is not None:
                self.faults.append(f"{kind}: {fault}")

    def growth(self) -> float | None:
        """Memory of the last quarter of the time by that of the second; None: too few samples."""
        quarter = len(self.memory) // 4
        if quarter == 0:
            return None
        sizes = [sum(processes.values()) for _, processes in self.memory]
        return mean(sizes[-quarter:]) / mean(sizes[quarter : 2 * quarter])


class Clients:
    """What clients send. `reference`: plain vLLM's greedy answers to `asked`, LONGEST tokens each.

    drafts: the most that a request may ask for.
    """

    def __init__(
        self, client: server.Client, model: str, asked: list[list[int]], reference: list[list[int]], drafts: int
    ) -> None:
        self.client, self.model, self.asked, self.reference = client, model, asked, reference
        self.drafts = drafts
        self.acts: dict[str, Callable[[random.Random], str | None]] = {
            "greedy": self.greedy,
            "sampled": self.sampled,
            "two answers": self.two_answers,
            "logprobs": lambda chance: self.greedy(chance, logprobs=2),
            "hangs up": self.hangs_up,
            "refused": self.refused,
        }

    def body(self, chance: random.Random, **more: Any) -> tuple[int, dict[str, Any]]:
        index = chance.randrange(len(self.asked))
        length = chance.randint(1, LONGEST)
        own = {"vllm_xargs": {"mtpc_drafts": chance.randint(0, self.drafts)}} if chance.random() < 0.5 else {}
        return index, {
            "model": self.model,
            "prompt": self.asked[index],
            "max_tokens": length,
            "ignore_eos": True,
            **own,
            **more,
        }

    def greedy(self, chance: random.Random, **more: Any) -> str | None:
        index, body = self.body(chance, temperature=0, **more)
        (tokens,) = self.client.complete(body)
        wanted = self.reference[index][: body["max_tokens"]]
        return None if tokens == wanted else f"prompt {index}: {tokens} instead of {wanted}"

    def sampled(self, chance: random.Random) -> str | None:
        seed = {"seed": chance.randrange(1 << 30)} if chance.random() < 0.5 else {}
        _, body = self.body(chance, temperature=chance.choice([0.5, 0.8, 1.2]), top_p=chance.choice([0.7, 1.0]), **seed)
        (tokens,) = self.client.complete(body)
        return None if len(tokens) == body["max_tokens"] else f"{len(tokens)} tokens of {body['max_tokens']}"

    def two_answers(self, chance: random.Random) -> str | None:
        _, body = self.body(chance, temperature=1.0, n=2)
        tokens = [token for answer in self.client.complete(body) for token in answer]
        return None if len(tokens) == 2 * body["max_tokens"] else f"{len(tokens)} tokens of 2 x {body['max_tokens']}"

    def hangs_up(self, chance: random.Random) -> str | None:
        """Reads a few lines of a stream, or none, and closes the connection."""
        _, body = self.body(chance, temperature=chance.choice([0, 1]), max_tokens=LONGEST, stream=True)
        with closing(http.client.HTTPConnection(server.HOST, self.client.port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            if chance.random() < 0.3:
                return None
            response = connection.getresponse()
            for _ in range(chance.randint(1, 6)):
                response.readline()
            return None if response.status == 200 else f"status {response.status}"

    def refused(self, chance: random.Random) -> str | None:
        _, good = self.body(chance, temperature=0)
        bad = chance.choice(
            [
                "no object",
                {**good, "prompt": [1] * 5000},
                {**good, "max_tokens": -1},
                {**good, "temperature": "hot"},
                {**good, "top_p": 5},
                {**good, "prompt": [10**9]},
                {**good, "model": "another"},
                {**good, "stop": 7},
                {"model": self.model},
            ]
        )
        answer = self.client.send("/v1/completions", bad, timeout_s=120)
        if 400 <= answer.status_code < 500 and "message" in answer.text:
            return None
        return f"status {answer.status_code} for {str(bad)[:80]}: {answer.text[:200]}"

    def act(self, chance: random.Random, tally: Tally) -> None:
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        try:
            fault = self.acts[kind](chance)
        except (EngineFailed, OSError, http.client.HTTPException, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
        tally.note(kind, fault)

    def swap(self, head: str, tally: Tally) -> None:
        """Has the server draft with another head from now on."""
        try:
            answer = self.client.send("/mtpc/head", {"path": str(Path(head).resolve())}, timeout_s=120)
            is_done = answer.status_code == 200
            fault = None if is_done else f"status {answer.status_code} for {head}: {answer.text[:200]}"
        except EngineFailed as error:
            fault = f"{type(error).__name__}: {error}"
        tally.note("swap", fault)


def resident_bytes(process: int) -> dict[str, int]:
    """Memory of a process and of each below it, by name; pages they share count for each."""
    import psutil

    first = psutil.Process(process)
    found: Counter[str] = Counter()
    for one in (first, *first.children(recursive=True)):
        try:
            # vLLM's processes call themselves VLLM::EngineCore and the like
            name = "server" if one == first else one.cmdline()[0].split("/")[-1]
            found[name] += one.memory_info().rss
        except (psutil.NoSuchProcess, IndexError):  # it has ended
            continue
    return dict(found)


def soak(
    clients: Clients, num_clients: int, seconds: float, seed: int, tally: Tally, heads: Sequence[str] = ()
) -> None:
    """Keeps `num_clients` busy for so long, swaps `heads` in turn, and watches memory."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    started, swaps = time.monotonic(), itertools.cycle(heads)
    next_swap = started + SWAP_S

    def one(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        while time.monotonic() - started < seconds and len(tally.faults) < 20:
            clients.act(chance, tally)

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with ThreadPoolExecutor(num_clients) as pool, Progress(*columns) as progress:
        task = progress.add_task("", total=seconds)
        running = [pool.submit(one, number) for number in range(num_clients)]
        while not all(future.done() for future in running):
            now = time.monotonic() - started
            tally.memory.append((round(now, 1), resident_bytes(clients.client.process)))
            text = f"{sum(tally.answered.values())} requests, {len(tally.faults)} faults"
            progress.update(task, completed=min(now, seconds), description=text)
            if heads and started + now >= next_swap:
                clients.swap(next(swaps), tally)
                next_swap += SWAP_S
            time.sleep(min(2.0, seconds / 20))
        for future in running:
            future.result()


def metrics(client: server.Client) -> Counter[str]:
    """The server's metrics by name, summed over engines."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(client.send("/metrics", timeout_s=5).text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


def aftermath(client: server.Client, patience_s: float = 30.0) -> Iterator[str]:
    """Return the faults of an idle server."""
    if client.send("/health", timeout_s=5).status_code != 200:
        yield "the server is not healthy"
        return
    deadline = time.monotonic() + patience_s
    while True:
        seen = metrics(client)
        busy = seen["vllm:num_requests_running"] + seen["vllm:num_requests_waiting"]
        if (not busy and not seen["vllm:kv_cache_usage_perc"]) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    if busy:
        yield f"{busy:.0f} requests are left though no client is"
    if seen["vllm:kv_cache_usage_perc"]:
        yield f"{100 * seen['vllm:kv_cache_usage_perc']:.2f} % of the KV cache is in use without requests"
    if not seen["vllm:num_preemptions_total"]:
        yield "nothing was preempted: the cache was not too small, so this was no test of preemption"


def reference(target: str, asked: list[list[int]], logs: Path) -> list[list[int]]:
    """Plain vLLM's greedy answers."""
    engine = {"model": target, "dtype": "float32", "max_model_len": 320, "max_num_seqs": 16, "enforce_eager": True}
    engine |= {"kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False}
    return serve(engine, asked, [0.0], LONGEST, logs / "plain.log", {"ignore_eos": True})[0].outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=str(demo.path("target")), help="default: the packaged demo target")
    parser.add_argument("--head", default=str(demo.path("btree")), help="a head (the packaged btree) or none")
    parser.add_argument("--runner", choices=["v1", "v2"], help="vLLM's model runner (default: its own choice)")
    parser.add_argument("--swap", nargs=2, metavar="HEAD", default=[], help="heads to swap in, in turn, every 10 s")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--clients", type=int, default=32, help="how many at once (32)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--json", type=Path, help="file for the report")


def environment(runner: str | None) -> dict[str, str]:
    """Of the server, so that it takes this model runner; V2 is interpreted where there is no GPU."""
    import torch

    if runner == "v2" and not torch.cuda.is_available():
        return INTERPRETED | NO_CACHE
    return NO_CACHE if runner is None else {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0", **NO_CACHE}


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    config = None if args.head == "none" else read_config(Path(args.head))
    asked = prompts.load([], args.target, PROMPTS, 200, 200)
    tally = Tally()
    # every step drafts, whatever the plan finds of a busy machine
    pinned = {"num_speculative_tokens_per_batch_size": "off"}
    speculative = {"method": config.speculators_model_type, "model": args.head, **pinned} if config else {}
    words = [args.target, "--enforce-eager"]
    words += ["--speculative-config", json.dumps(speculative)] if config else []
    words += [word for key, value in SERVER.items() for word in (f"--{key}", str(value))]
    with tempfile.TemporaryDirectory() as logs:
        wanted = reference(args.target, asked, Path(logs))
        around = environment(args.runner) | ({"MTPC_ALLOW_HEAD_SWAP": "1"} if args.swap else {})
        with server.run_server(words, Path(logs) / "server.log", around) as client:
            most = config.num_speculative_tokens if config else 0
            clients = Clients(client, client.model_card()["id"], asked, wanted, most)
            soak(clients, args.clients, 60 * args.minutes, args.seed, tally, args.swap)
            faults = [*tally.faults, *aftermath(client)]
            seen, accepted = metrics(client), client.acceptance()
    growth = tally.growth()
    if growth is not None and growth > GROWTH and args.minutes >= SETTLED:
        faults.append(f"memory has grown to {growth:.3f} of the reference; allowed: {GROWTH}")
    report = {
        "kind": "soak",
        **provenance.collect(),
        "runner": args.runner,
        "minutes": args.minutes,
        "clients": args.clients,
        "server": SERVER,
        "environment": NO_CACHE,
        "speculative_config": {**speculative, "model": provenance.public(args.head)} if config else None,
        "swapped": [provenance.public(head) for head in args.swap],
        "requests": dict(tally.answered),
        "greedy_equal_to_plain": tally.answered["greedy"] + tally.answered["logprobs"] if not tally.faults else None,
        "preemptions": int(seen["vllm:num_preemptions_total"]),
        "tokens": int(seen["vllm:generation_tokens_total"]),
        "tokens_per_step": round(accepted.tokens_per_step, 3),
        "memory_growth": None if growth is None else round(growth, 4),
        "memory_mib": [
            [second, {name: size >> 20 for name, size in sizes.items()}]
            for second, sizes in tally.memory[:: max(1, len(tally.memory) // 60)]
        ],
        "faults": faults,
    }
    for fault in faults:
        print(f"FAULT {fault}")
    print(json.dumps({key: value for key, value in report.items() if key not in ("memory_mib", "faults", "server")}))
    if args.json is not None:
        write_json(args.json, report)
    return int(bool(faults))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    return guard(PROG, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
