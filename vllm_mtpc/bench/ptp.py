"""PTP heads beside plain vLLM in one run: ``python -m vllm_mtpc.bench.ptp [--json FILE]``.

Every engine runs Model Runner V2 in a process of its own, with the same settings; on a machine without a GPU under
``scripts/v2_on_cpu.sh`` (kernels in Triton's interpreter: speeds are comparable with each other, not with V1's).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_mtpc import demo
from vllm_mtpc.bench import offline, prompts, provenance
from vllm_mtpc.bench.acceptance import DEFINITIONS
from vllm_mtpc.bench.passes import Measured, Setting

CLIENTS = (1, 4, 16)
TEMPERATURES = (1.0, 0.0)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m vllm_mtpc.bench.ptp", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(demo.path("target")), help="default: the packaged one")
    parser.add_argument("--head", default=str(demo.path("o-ptp")), help="PTP head (default: the packaged o-ptp)")
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="default: 16")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--num-drafts", type=int, metavar="K", help="default: as the head says")
    parser.add_argument("--max-aux-rows", type=int, nargs="+", default=[64], metavar="N", help="merged passes to try")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), metavar="C", help="default: 1 4 16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    return parser


def engines(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """``speculative_config`` by name; None: plain vLLM."""
    head = {"method": "ptp", "model": args.head}
    if args.num_drafts:
        head["num_speculative_tokens"] = args.num_drafts
    merged = {f"merged, {rows} rows": {**head, "max_aux_rows": rows} for rows in args.max_aux_rows}
    return {"plain": None, "two passes": {**head, "draft_pass": "two-pass"}, **merged}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per engine, number of clients and temperature; speed-up over the plain row of the same setting."""
    texts = prompts.held_out(args.prompts)
    settings = [
        Setting(f"c={clients}", clients, temperature, args.max_tokens, max(args.prompts // 4, clients))
        for temperature in TEMPERATURES
        for clients in args.clients
    ]
    base = {
        "model": args.target,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": max(args.clients),
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "seed": 0,
        "kv_cache_memory_bytes": 512 << 20,
    }
    rows, plain = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, speculative in engines(args).items():
            print(f"--- {name}", flush=True)
            engine = {**base, **({"speculative_config": speculative} if speculative else {})}
            for found in offline.run(engine, texts, settings, Path(folder) / "engine.log"):
                rows.append(row(name, found, plain.setdefault(found.setting, found)))
                print(line(rows[-1]), flush=True)
    return rows


def row(name: str, found: Measured, plain: Measured) -> dict[str, Any]:
    """The figures of one pass."""
    identical = found.identical(plain) if found.setting.greedy else None
    figures = found.figures()
    return {
        "decoding": name,
        **figures,
        "speedup": round(found.tokens_per_second / plain.tokens_per_second, 4),
        "identical": None if identical is None else [identical, len(plain.outputs)],
    }


def line(one: dict[str, Any]) -> str:
    """A row of the Markdown table."""
    setting = one["setting"]
    identical = "" if one["identical"] is None else "{} of {}".format(*one["identical"])
    cells = [
        f"T={setting['temperature']:g}, {setting['name']}",
        one["decoding"],
        f"{one['tokens_per_second']:.1f}",
        f"{one['speedup']:.2f}x",
        f"{one['tokens_per_step']:.2f}",
        identical,
    ]
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints a Markdown table; exits with 1 where greedy output differs from plain vLLM's."""
    args = parser().parse_args(arguments)
    rows = measure(args)
    print("| setting | decoding | tok/s | speed-up | tokens/step | identical |\n|---|---|---|---|---|---|")
    print("\n".join(map(line, rows)))
    print(DEFINITIONS)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        settings = {key: provenance.public(value) for key, value in settings.items()}
        values = {**provenance.collect(), "definitions": DEFINITIONS.splitlines(), "settings": settings, "rows": rows}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return 1 if any(one["identical"] and one["identical"][0] < one["identical"][1] for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
