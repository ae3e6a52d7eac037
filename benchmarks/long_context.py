"""Drafts after long texts: ``python -m benchmarks.long_context [--positions 1000 8000 32000] [--json FILE]``.

One request at a time continues texts of these lengths, plain and with each head: tokens/step, milliseconds of a step
and of its draft. YaRN extends the positions of a shorter target, so its text there is not the text that it
was trained to write; heads draft for the text it does write.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.offline import Measured, Setting, launched
from benchmarks.step_clock import DEFINITIONS
from vllm_mtpc import demo
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError
from vllm_mtpc.plots.draw import looks_of, panels, save
from vllm_mtpc.report import check_file, print_table, write_json

PROG = "python -m benchmarks.long_context"
LENGTH = 96  # tokens of an answer
COLUMNS = ("positions", "T", "drafts by", "tokens/step", "step ms", "draft ms", "equal to plain")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    made.add_argument("--target", default=str(demo.path("target")), help="default: the packaged demo target")
    made.add_argument("--heads", nargs="+", default=[str(demo.path("hmm")), str(demo.path("btree"))])
    made.add_argument("--positions", type=int, nargs="+", default=[1000, 8000, 32000], metavar="TOKENS")
    made.add_argument("--texts", type=int, default=3, help="at each length (3)")
    made.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--figure", type=Path, metavar="FILE", help="an SVG, a PNG next to it")
    return made


def texts(target: str, length: int, count: int) -> list[list[int]]:
    """The first `length` tokens of Python's largest modules: other ones than windows of a training text begin with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: -file.stat().st_size)
    made = [tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"] for file in files[:40]]
    long = [tokens[:length] for tokens in made if len(tokens) >= length][:count]
    if len(long) < count:
        raise UsageError(
            f"--positions {length}: {len(long)} Python texts have this length; reduce --texts to this number"
        )
    return long


def engine(target: str, longest: int) -> dict[str, Any]:
    """Arguments of `LLM` for so long a text."""
    config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    limit, length = config["max_position_embeddings"], longest + LENGTH + 16
    given: dict[str, Any] = {"model": target, "dtype": "float32", "max_num_seqs": 1, "enforce_eager": True}
    given |= {"max_model_len": length, "kv_cache_memory_bytes": 1 << 30, "max_num_batched_tokens": 2048}
    if length > limit:
        rope = {**config["rope_parameters"], "rope_type": "yarn", "factor": float(math.ceil(length / limit))}
        rope["original_max_position_embeddings"] = limit
        given["hf_overrides"] = {"rope_parameters": rope, "max_position_embeddings": limit * math.ceil(length / limit)}
    return given


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, plain = [], {}
    asked = {length: texts(args.target, length, args.texts) for length in args.positions}
    prompts = [text for length in args.positions for text in asked[length]]
    for head in (None, *args.heads):
        spec = {"speculative_config": {"method": "mtpc", "model": head}} if head else {}
        name = Path(head).name if head else "plain"
        with (
            TemporaryDirectory() as logs,
            launched({**engine(args.target, max(args.positions)), **spec}, prompts, Path(logs) / "log") as running,
        ):
            for index, length in enumerate(args.positions):
                for temperature in args.temperatures:
                    setting = Setting(name, 1, temperature, LENGTH, args.texts, first=index * args.texts)
                    found = running.measure(setting)
                    plain.setdefault((length, temperature), found)
                    rows.append(row(name, length, temperature, found, plain[length, temperature]))
                    print(
                        f"{name}, {length} positions, T={temperature:g}: {rows[-1]['tokens_per_step']} tokens/step",
                        flush=True,
                    )
    return rows


def row(name: str, length: int, temperature: float, found: Measured, plain: Measured) -> dict[str, Any]:
    return {
        "positions": length,
        "temperature": temperature,
        "head": name,
        "tokens_per_step": round(found.tokens_per_step, 3),
        "step_ms": round(found.steps.step_ms, 2),
        "draft_ms": round(found.steps.draft_ms, 2),
        "equal_to_plain": found.identical(plain) if temperature == 0 else None,
        "texts": len(found.answers),
    }


def draw(rows: list[dict[str, Any]], file: Path) -> list[Path]:
    """Tokens/step above, milliseconds of a step and of its draft below, by positions."""
    looks = looks_of([one["head"] for one in rows])
    temperatures = sorted({one["temperature"] for one in rows})
    with panels(2, len(temperatures), (3.6 * len(temperatures), 5.0), sharex=True) as (figure, axes):
        for column, temperature in enumerate(temperatures):
            above, below = axes[column], axes[len(temperatures) + column]
            for name in dict.fromkeys(one["head"] for one in rows):
                mine = [one for one in rows if (one["head"], one["temperature"]) == (name, temperature)]
                at = [one["positions"] for one in mine]
                above.plot(at, [one["tokens_per_step"] for one in mine], label=name, **looks[name])
                below.plot(at, [one["step_ms"] for one in mine], label=f"{name}: step", **looks[name])
                if name != "plain":
                    draft = looks[name] | {"linestyle": ":", "alpha": 0.7}
                    below.plot(at, [one["draft_ms"] for one in mine], label=f"{name}: its draft", **draft)
            above.set(title=f"T = {temperature:g}", ylabel="tokens/step")
            below.set(xlabel="tokens before the answer", ylabel="ms", xscale="log", yscale="log")
            above.legend()
            below.legend()
        return save(figure, file.parent, file.stem)


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    rows = measure(args)
    cells = [
        [one["positions"], one["temperature"], one["head"], one["tokens_per_step"], one["step_ms"], one["draft_ms"],
         "" if one["equal_to_plain"] is None else f"{one['equal_to_plain']} of {one['texts']}"]
        for one in rows
    ]  # fmt: skip
    print_table("Drafts after long texts", COLUMNS, [[str(cell) for cell in line] for line in cells])
    report = {"kind": "long context", "definitions": DEFINITIONS.splitlines(), **provenance.collect()}
    report |= {"target": provenance.public(args.target), "answer_tokens": LENGTH, "rows": rows}
    if args.json is not None:
        write_json(args.json, report)
    if args.figure is not None:
        draw(rows, args.figure)
    return 0


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    return guard(PROG, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
