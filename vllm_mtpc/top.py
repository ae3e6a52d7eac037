"""`vllm-mtpc top URL`: a server at a glance, live: speed, latency, and what becomes of its drafts.

Everything is read from the server's `/metrics`, which `vllm serve` has without a flag; nothing is installed there. A
figure is of the seconds between two looks; with `--once` of all the time since the server started.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_mtpc.engine.counters import CUTS
from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
STEPS = "vllm:spec_decode_steps_total"  # of this package
CUT = "vllm:spec_decode_drafts_cut_total"
DRAFT_SECONDS = "vllm:spec_decode_draft_seconds_total"
DRAFT_PASSES = "vllm:spec_decode_draft_passes_total"
LATENCIES = {
    "first token": "vllm:time_to_first_token_seconds",
    "between outputs": "vllm:inter_token_latency_seconds",
    "whole request": "vllm:e2e_request_latency_seconds",
}
LABELS = ("le", "position", "by")  # those that tell values of one name apart
BAR = 30  # characters


@dataclass(frozen=True)
class Look:
    """The counters of one moment: (name, the label that matters or "") -> value, summed over engines and models."""

    time: float
    values: dict[tuple[str, str], float]

    @classmethod
    def parse(cls, text: str, now: float) -> Look:
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, next((sample.labels[name] for name in LABELS if name in sample.labels), "")
                values[key] = values.get(key, 0.0) + sample.value
        return cls(now, values)

    def get(self, name: str, label: str = "") -> float:
        return self.values.get((name, label), 0.0)

    def labels(self, name: str) -> list[str]:
        """Labels of a name, in the order of their numbers."""
        return sorted((label for key, label in self.values if key == name), key=float)


@dataclass(frozen=True)
class Between:
    """What happened between two looks. A server that was started again in between counts from its start."""

    before: Look
    after: Look

    @property
    def seconds(self) -> float:
        return max(self.after.time - self.before.time, 1e-9)

    def count(self, name: str, label: str = "") -> float:
        now, then = self.after.get(name, label), self.before.get(name, label)
        return now - then if now >= then else now

    def quantile(self, name: str, share: float) -> float | None:
        """Seconds that `share` of a histogram's observations do not exceed, linear within a bucket; None: none."""
        edges = [(float(label), self.count(f"{name}_bucket", label)) for label in self.after.labels(f"{name}_bucket")]
        if not edges or edges[-1][1] <= 0:
            return None
        wanted, low, below = share * edges[-1][1], 0.0, 0.0
        for edge, count in edges:
            if count >= wanted:
                return low if math.isinf(edge) else low + (edge - low) * (wanted - below) / max(count - below, 1e-9)
            low, below = edge, count
        return low

    def figures(self) -> dict[str, Any]:
        """What is shown, as plain numbers; None where nothing was seen."""
        drafts, passes = self.count(DRAFTS), self.count(DRAFT_PASSES)
        steps = self.count(STEPS) or self.count("vllm:generation_tokens_total") - self.count(ACCEPTED)  # other methods
        cut = {name: self.count(CUT, name) for name in CUTS}
        room = self.count(DRAFTED) + sum(cut.values())
        positions = [self.count(ACCEPTED_AT, place) for place in self.after.labels(ACCEPTED_AT)]
        return {
            "seconds": round(self.seconds, 3),
            "running": int(self.after.get("vllm:num_requests_running")),
            "waiting": int(self.after.get("vllm:num_requests_waiting")),
            "kv_cache_share": self.after.get("vllm:kv_cache_usage_perc"),
            "prompt_tokens_per_second": self.count("vllm:prompt_tokens_total") / self.seconds,
            "tokens_per_second": self.count("vllm:generation_tokens_total") / self.seconds,
            "preemptions": int(self.count("vllm:num_preemptions_total")),
            "tokens_per_step": 1 + self.count(ACCEPTED) / steps if steps else None,
            "drafts_per_step": self.count(DRAFTED) / steps if steps else None,
            "drafts_cut": {name: count / room for name, count in cut.items()} if room else {},
            "accepted_share": self.count(ACCEPTED) / self.count(DRAFTED) if self.count(DRAFTED) else None,
            "draft_pass_seconds": self.count(DRAFT_SECONDS) / passes if passes else None,
            "acceptance_per_position": [count / drafts for count in positions] if drafts else [],
            "latency_seconds": {
                what: {f"p{share}": self.quantile(name, share / 100) for share in (50, 95)}
                for what, name in LATENCIES.items()
            },
        }


def look(url: str, timeout_s: float = 5.0) -> Look:
    """Raises UsageError, one line."""
    address = f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=timeout_s) as answer:
            text = answer.read().decode("utf-8", errors="replace")
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise UsageError(f"{address}: {error}; name a server that runs, e.g. http://localhost:8000") from None
    if "vllm:" not in text:
        raise UsageError(
            f"{address} has no metrics of vLLM; name the address of `vllm serve`, without --disable-log-stats"
        )
    return Look.parse(text, time.monotonic())


def screen(figures: dict[str, Any], url: str) -> RenderableType:
    """The figures as rich text."""
    from rich.console import Group
    from rich.table import Table

    speed = Table(title=f"{url}, {figures['seconds']:.1f} s", title_justify="left", box=None, padding=(0, 2, 0, 0))
    rows = [
        ("requests", f"{figures['running']} running, {figures['waiting']} waiting, {figures['preemptions']} preempted"),
        ("KV cache", f"{100 * figures['kv_cache_share']:.1f} %"),
        ("tokens", f"{figures['tokens_per_second']:.1f} /s out, {figures['prompt_tokens_per_second']:.1f} /s in"),
    ]
    for what, times in figures["latency_seconds"].items():
        rows.append((what, ", ".join(f"{name} {_milliseconds(value)}" for name, value in times.items())))
    rows += _draft_rows(figures)
    for name, value in rows:
        speed.add_row(name, value)
    bars = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for position, rate in enumerate(figures["acceptance_per_position"], start=1):
        bars.add_row(f"draft {position}", "█" * round(BAR * rate), f"{100 * rate:.1f} %")
    return Group(speed, bars)


def _draft_rows(figures: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if figures["tokens_per_step"] is None:
        return [("tokens/step", "none")]
    accepted = figures["accepted_share"]
    cut = ", ".join(f"{name} {100 * share:.0f} %" for name, share in figures["drafts_cut"].items())
    return [
        ("tokens/step", f"{figures['tokens_per_step']:.2f} over all steps"),
        ("drafts", f"{figures['drafts_per_step']:.2f} per step, {100 * (accepted or 0):.1f} % accepted"),
        ("drafts cut", cut or "-"),
        ("draft pass", _milliseconds(figures["draft_pass_seconds"])),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="address of `vllm serve`, e.g. http://localhost:8000")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks (2)")
    parser.add_argument("--once", action="store_true", help="one look: everything since the server started")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each look instead of a screen")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    if not args.interval > 0:
        raise UsageError(f"--interval {args.interval:g}: seconds above 0 are allowed; type e.g. --interval 2")
    console = Console()
    if args.once:
        now = look(args.url)
        started = now.get("process_start_time_seconds") or time.time()
        all_of_it = Between(Look(now.time - max(time.time() - started, 1e-3), {}), now).figures()
        _show(all_of_it, args, console)
        return 0
    before = look(args.url)
    with contextlib.nullcontext() if args.json else Live(console=console, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval)
            after = look(args.url)
            figures = Between(before, after).figures()
            if live is None:
                _show(figures, args, console)
            else:
                live.update(screen(figures, args.url), refresh=True)
            before = after


def _show(figures: dict[str, Any], args: argparse.Namespace, console: Any) -> None:
    if args.json:
        print(json.dumps(figures), flush=True)
    else:
        console.print(screen(figures, args.url))
