"""The demo: a server with a head, and batch jobs with and without heads, on the models that come in the package.

All engines start at once. Then `vllm serve` answers a client; then plain vLLM and the BTree head take turns at the same
prompts, offline, sampled and greedy. The PTP head needs Model Runner V2. Without a GPU its kernels run in Triton's
interpreter: its tokens are real there, its speed says nothing and is not compared. Exits with 1 when any greedy output
differs from plain vLLM's. `vllm-mtpc bench serve --demo` compares all heads, with peers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from vllm_mtpc import demo
from vllm_mtpc.bench import decodings, report, rounds, serve
from vllm_mtpc.bench.decodings import OWN, Decoding
from vllm_mtpc.data import prompts
from vllm_mtpc.engine import passes
from vllm_mtpc.engine.passes import Measured, Setting
from vllm_mtpc.errors import EngineFailed
from vllm_mtpc.report import check_folder, print_table

SILENCE_S = 10.0
BATCH, ROUNDS, MAX_TOKENS = 16, 2, 96
CELLS = [
    Setting(f"T={temperature:g}, c={clients}", clients, temperature, MAX_TOKENS, max(8, 3 * clients))
    for temperature in (1.0, 0.0)
    for clients in (1, BATCH)
]
SERVED = Setting("vllm serve", 1, 0.0, MAX_TOKENS, 8)  # the prompts of CELLS with one client
INTERPRETED = [Setting(f"T={temperature:g}, c=1", 1, temperature, 48, 4) for temperature in (1.0, 0.0)]
ON_GPU = {"kv_cache_memory_bytes": decodings.CPU_CACHE_BYTES, "gpu_memory_utilization": 0.1}  # several at once


class Lines(rounds.Progress):
    """Print progress at least every SILENCE_S seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.last, self.now = time.monotonic(), "engines are starting"
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, text: str) -> None:
        self.last = time.monotonic()
        super().say(text)

    def _beat(self) -> None:
        while self.now:
            time.sleep(1.0)
            if self.now and time.monotonic() - self.last > SILENCE_S:
                self.say(f"... {self.now}")


def same(mine: Measured, plain: Measured) -> tuple[int, int]:
    """Answers that are plain vLLM's token for token, as far as they go, and how many there are."""
    pairs = zip(mine.outputs, plain.outputs, strict=False)
    return sum(own == other[: len(own)] for own, other in pairs), len(mine.outputs)


def measure(lines: Lines, logs: Path) -> tuple[rounds.Comparison, Measured, list[rounds.Pass]]:
    """Plain and heads side by side; the server's pass; passes of heads that only the interpreter runs here."""
    on_gpu = torch.cuda.is_available()
    heads, _ = decodings.heads([str(demo.path("btree")), str(demo.path("late"))], {}, None, on_gpu)
    engine = decodings.arguments(str(demo.path("target")), "float32", 512, BATCH, on_gpu, ON_GPU if on_gpu else {})
    texts = prompts.held_out(ROUNDS * max(cell.prompts for cell in CELLS))
    comparison = rounds.Comparison(lines)
    with ExitStack() as stack:
        running: dict[Decoding, passes.Resident] = {}
        for one in (decodings.plain(), *heads):
            lines.say(f"starting {one.name} ({one.group}), offline")
            drafts = {} if one.is_plain else {"speculative_config": one.speculative}
            log = logs / f"{one.name}.log"
            running[one] = stack.enter_context(passes.launched({**engine, **drafts}, texts, log, one.environment))
        words = decodings.command({**engine, "model": demo.path("btree"), "served_model_name": "demo"})
        lines.say(f"starting vllm serve {' '.join(words)}")
        client = stack.enter_context(serve.server(words, logs / "serve.log"))
        for one, waiting in running.items():
            lines.say(f"{one.name}: ready on model runner {waiting.about['runner']}")
        lines.now = "measuring"
        served = serve.Served(client, texts).measure(SERVED)
        first, later = 1000 * served.first_token_seconds, 1000 * served.token_seconds
        lines.say(f"vllm serve, one client: first token after {first:.0f} ms, each further one after {later:.1f} ms")
        own = [one for one in running if one.group == OWN]
        rounds.interleaved(own, CELLS, ROUNDS, lambda one: nullcontext(running[one]), comparison)
        others = [one for one in running if one.group != OWN]
        alone = [comparison.measure(running[one], one, cell, 0) for one in others for cell in INTERPRETED]
    return comparison, served, alone


def show(comparison: rounds.Comparison, served: Measured, alone: Sequence[rounds.Pass]) -> bool:
    """Prints everything; whether all greedy output is plain vLLM's."""
    found = report.rows(comparison.passes)
    print_table("tok/s and speed-up over plain vLLM, same machine, same run", *report.overview(found, OWN))
    print_table("everything", *report.details(found))
    print("\n" + "\n".join(report.definitions(over_http=False)))
    plain = next(one.measured for one in comparison.passes if one.decoding.is_plain and one.cell == CELLS[2])
    for one in alone:
        where = f"{one.decoding.name}, {one.cell.name} ({one.decoding.group})"
        print(f"{where}: {one.measured.tokens_per_step:.2f} tokens/step (its interpreted speed says nothing)")
    wordy = max(range(len(served.answers)), key=lambda index: len(served.answers[index].text.split()))
    print("\nThe server's answer with most words, after its prompt:\n")
    print(prompts.held_out(wordy + 1)[wordy] + "|" + served.answers[wordy].text)
    checked = [tuple(row["identical"]) for row in found if row["identical"]]
    checked += [same(served, plain), *(same(one.measured, plain) for one in alone if one.cell.greedy)]
    right, total = (sum(numbers) for numbers in zip(*checked, strict=True))
    print(f"\ngreedy outputs identical to plain vLLM's, offline and served: {right} of {total}")
    return right == total


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__.split("\n\n")[0])
    parser.add_argument("--logs", metavar="DIR", type=Path, help="keep the engines' logs here (default: removed)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    check_folder(options.logs, "--logs")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended on the way out
    torch.set_num_threads(1)  # this process only waits and reads text; the cores belong to the engines
    lines = Lines(2 * ROUNDS * len(CELLS) + len(INTERPRETED))
    with tempfile.TemporaryDirectory() as folder:
        try:
            comparison, served, alone = measure(lines, options.logs or Path(folder))
        except EngineFailed as error:
            print(error, file=sys.stderr)
            return 2
        finally:
            lines.now = ""
            lines.bar.close()
    is_same = show(comparison, served, alone)
    print(f"{time.monotonic() - lines.started:.0f} s in all")
    return 2 if comparison.missing else 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
