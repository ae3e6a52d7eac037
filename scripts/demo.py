"""The demo: vLLM with heads beside plain vLLM, over HTTP and offline, on the models that come in the package.

MtPC heads run on the machine's own model runner. PTP heads need Model Runner V2; without a GPU its kernels run in
Triton's interpreter, plain vLLM's beside them too, so that only the drafts differ there as well. Each engine runs
alone, in a process of its own, with the same settings. Exits with 1 when any greedy output differs from plain vLLM's.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_mtpc.bench import offline, prompts, provenance, serve
from vllm_mtpc.bench.acceptance import DEFINITIONS
from vllm_mtpc.bench.passes import Measured, Setting
from vllm_mtpc.bench.process import EngineFailed

BATCH = 16
KV_CACHE_BYTES = 256 << 20  # the batch at full length in float32 needs half of it
HTTP = Setting("HTTP stream, 1 client", clients=1, temperature=0.0, max_tokens=128, prompts=24)
ONE = Setting("offline, 1 client", clients=1, temperature=0.0, max_tokens=128, prompts=24, repeats=2)
BATCHED = Setting(f"offline, batch {BATCH}", clients=BATCH, temperature=0.0, max_tokens=128, prompts=3 * BATCH)
SAMPLED = replace(BATCHED, temperature=1.0)
V2 = Setting("offline, 1 client, runner V2", clients=1, temperature=0.0, max_tokens=64, prompts=6)
V2_SAMPLED = replace(V2, temperature=1.0)
# Interpreted kernels cost by the call, few rows hardly anything: the same table as on a GPU, small for a CPU's sake
PTP_ROWS = 48
INTERPRETER = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "PYTHONPATH": str(Path(__file__).parent / "interpreter"),
}


@dataclass(frozen=True)
class Row:
    """One line of the table; ``plain`` is the pass of plain vLLM with the same setting."""

    decoding: str
    measured: Measured
    plain: Measured

    @property
    def speedup(self) -> float:
        return self.measured.tokens_per_second / self.plain.tokens_per_second

    @property
    def identical(self) -> tuple[int, int] | None:
        """Identical greedy outputs and how many there are; None for a sampled pass, whose law is what must agree."""
        if not self.measured.setting.greedy or self.measured is self.plain:
            return None
        return self.measured.identical(self.plain), len(self.plain.outputs)

    @property
    def differs(self) -> bool:
        return self.identical is not None and self.identical[0] < self.identical[1]


class Demo:
    """Runs the engines one after the other and collects the rows."""

    def __init__(self, target: Path, texts: list[str], quick: bool, logs: Path, console: Console) -> None:
        self.target, self.texts, self.quick, self.logs, self.console = target, texts, quick, logs, console
        self.started = time.perf_counter()
        self.plain: dict[Setting, Measured] = {}
        self.rows: list[Row] = []
        self.on_cpu = not torch.cuda.is_available()

    def say(self, text: str) -> None:
        self.console.print(f"[dim]\\[demo {time.perf_counter() - self.started:3.0f} s][/dim] {text}")

    def record(self, name: str, measured: Measured) -> None:
        plain = self.plain.setdefault(measured.setting, measured)
        self.rows.append(Row(name, measured, plain))
        where = f"{measured.setting.name}, T={measured.setting.temperature:g}"
        step = measured.acceptance.tokens_per_step
        self.say(f"  {name}: {where}: {measured.tokens_per_second:.0f} tok/s, {step:.2f} tokens/step")

    def scaled(self, setting: Setting) -> Setting:
        fewer = min(setting.prompts, max(8, setting.clients))
        return replace(setting, prompts=fewer, repeats=1) if self.quick else setting

    def http(self, name: str, speculative: dict[str, Any] | None) -> None:
        arguments = [str(self.target), "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", str(BATCH)]
        arguments += ["--no-enable-prefix-caching", "--served-model-name", "demo"]
        arguments += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES), *(["--enforce-eager"] if self.on_cpu else [])]
        if speculative:
            arguments += ["--speculative-config", json.dumps(speculative)]
        shown = " ".join(f"'{word}'" if word.startswith("{") else word for word in arguments)
        self.say(f"{name}: vllm serve {escape(shown)}")
        with serve.server(arguments, self.logs / f"serve-{name.replace(' ', '-')}.log") as client:
            self.record(name, serve.measure(client, self.texts, self.scaled(HTTP)))

    def offline(
        self, name: str, speculative: dict[str, Any] | None, settings: Sequence[Setting], v2: bool = False
    ) -> None:
        engine = {
            "model": str(self.target),
            "dtype": "float32",
            "max_model_len": 512 if v2 else 1024,
            "max_num_seqs": 4 if v2 else BATCH,
            "enable_prefix_caching": False,
            "seed": 0,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "enforce_eager": self.on_cpu,
            **({"speculative_config": speculative} if speculative else {}),
        }
        environment = INTERPRETER if v2 and self.on_cpu else None
        self.say(f"{name}: LLM.generate{' on Model Runner V2' if v2 else ''}{', interpreted' if environment else ''}")
        log = self.logs / f"offline-{name.replace(' ', '-')}{'-v2' if v2 else ''}.log"
        passes = [self.scaled(setting) for setting in settings]
        for measured in offline.run(engine, self.texts, passes, log, environment):
            self.record(name, measured)

    def table(self) -> Table:
        table = Table(title="vLLM with heads beside plain vLLM, same machine, same run", title_justify="left")
        table.add_column("decoding", no_wrap=True)
        table.add_column("setting", no_wrap=True)
        for column in ("T", "tok/s", "speed-up", "tokens/step"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("acceptance per position")
        table.add_column("identical", justify="right", no_wrap=True)
        order = sorted(self.rows, key=lambda row: list(self.plain).index(row.measured.setting))
        for index, row in enumerate(order):
            setting, acceptance = row.measured.setting, row.measured.acceptance
            last = index + 1 == len(order) or order[index + 1].measured.setting != setting
            table.add_row(
                row.decoding,
                setting.name,
                f"{setting.temperature:g}",
                f"{row.measured.tokens_per_second:.1f}",
                "" if row.measured is row.plain else f"{row.speedup:.2f}x",
                f"{acceptance.tokens_per_step:.2f}",
                " ".join(f"{rate:.2f}" for rate in acceptance.per_position),
                "" if row.identical is None else f"{row.identical[0]}/{row.identical[1]}",
                style="bold red" if row.differs else None,
                end_section=last,
            )
        return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts, one repetition, no second circuit")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write figures, hardware, versions and commit here")
    parser.add_argument("--logs", metavar="DIR", type=Path, help="keep the engines' logs here (default: removed)")
    return parser.parse_args(arguments)


def run(demo: Demo) -> None:
    """The passes. One client is where latency shows; the batch is where a step is shared by all."""
    from vllm_mtpc.demo import PTP, path

    btree = {"method": "mtpc", "model": str(path("btree"))}
    demo.http("plain", None)
    demo.http("mtpc btree", btree)
    demo.offline("plain", None, [ONE, BATCHED, SAMPLED])
    demo.offline("mtpc btree", btree, [ONE, BATCHED, SAMPLED])
    if not demo.quick:
        demo.offline("mtpc ff", {"method": "mtpc", "model": str(path("ff"))}, [BATCHED, SAMPLED])
    demo.offline("plain", None, [V2, V2_SAMPLED], v2=True)
    for name in ("o-ptp",) if demo.quick else PTP:
        head = {"method": "ptp", "model": str(path(name)), "max_aux_rows": PTP_ROWS}
        demo.offline(f"ptp {name}", head, [V2, V2_SAMPLED], v2=True)


def report(demo: Demo) -> int:
    """Prints everything and returns the exit code."""
    console = demo.console
    console.print()
    console.print(demo.table())
    console.print(DEFINITIONS, highlight=False)
    console.print("speed-up: tok/s divided by plain vLLM's tok/s in the row above it with the same setting.")
    sampled = {
        row.decoding: row for row in demo.rows if row.measured.setting.name == BATCHED.name and not row.identical
    }
    if {"mtpc btree", "mtpc ff"} <= sampled.keys():
        btree, ff = (sampled[name].measured.acceptance.tokens_per_step for name in ("mtpc btree", "mtpc ff"))
        console.print(f"BTree / FF in tokens/step at T=1: {btree:.2f} / {ff:.2f} = [bold]{btree / ff:.2f}x[/bold]")
    shown = next(row for row in demo.rows if row.decoding != "plain").measured
    wordy = max(range(len(shown.texts)), key=lambda index: len(shown.texts[index].split()))
    console.print("\n[bold]What was generated[/bold] over HTTP with drafts (prompt dim; the answer with most words):")
    console.print(f"[dim]{escape(demo.texts[wordy])}[/dim]{escape(shown.texts[wordy])}", highlight=False)
    differing = [row for row in demo.rows if row.differs]
    checked = [row.identical for row in demo.rows if row.identical]
    total = f"{sum(pair[0] for pair in checked)}/{sum(pair[1] for pair in checked)}"
    console.print(f"\nidentical greedy outputs: {total}; {time.perf_counter() - demo.started:.0f} s in all")
    for row in differing:
        console.print(f"[bold red]{row.decoding}, {row.measured.setting.name}: greedy output differs from plain vLLM")
    return 1 if differing else 0


def write_json(demo: Demo, file: Path) -> None:
    rows = [
        {
            "decoding": row.decoding,
            **row.measured.figures(),
            "speedup": round(row.speedup, 4),
            "identical": row.identical,
        }
        for row in demo.rows
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {**provenance.collect(), "definitions": DEFINITIONS.splitlines(), "rows": rows}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended on the way out
    torch.set_num_threads(1)  # this process only waits and reads text; the cores belong to the engines
    console = Console(width=None if sys.stdout.isatty() else 150)
    from vllm_mtpc.demo import path

    with tempfile.TemporaryDirectory() as folder:
        demo = Demo(
            path("target"), prompts.held_out(BATCHED.prompts), options.quick, options.logs or Path(folder), console
        )
        try:
            run(demo)
        except EngineFailed as error:
            console.print(f"[bold red]{escape(str(error))}", highlight=False)
            return 2
        if options.json:
            write_json(demo, options.json)
        return report(demo)


if __name__ == "__main__":
    sys.exit(main())
