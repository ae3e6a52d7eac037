"""``python -m benchmarks.demo.train_target``: trains and measures a byte-level target, writes card and provenance."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

from vllm_mtpc import demo

LIBRARY = (
    "source text of the Python standard library as bytes: *.py without tests and site-packages, sorted; "
    "every 20th file held out"
)
LOSS_BYTES = 131072  # of held-out text, evenly spread, for bits per byte


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo.train_target", description=__doc__)
    parser.add_argument("--out", type=Path, default=demo.path("target"), metavar="FOLDER")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this text, not on the standard library")
    parser.add_argument("--steps", type=int, metavar="N", help="default: that of byte_target.py")
    parser.add_argument("--long-steps", type=int, metavar="N", help="those on long windows, in the second half")
    parser.add_argument("--also", nargs="*", default=[], metavar="PATTERN", help="and on the files that match")
    parser.add_argument("--about", default="", metavar="TEXT", help="what the files of --also are, for the card")
    parser.add_argument("--tokens-per-step", type=int, metavar="N", help="default: that of byte_target.py")
    parser.add_argument("--hidden-size", type=int, metavar="N", help="default: that of byte_target.py")
    parser.add_argument("--layers", type=int, metavar="N", help="default: that of byte_target.py")
    parser.add_argument("--intermediate-size", type=int, metavar="N", help="default: that of byte_target.py")
    parser.add_argument("--positions", type=int, metavar="N", help="also the length of long windows")
    parser.add_argument("--short-window", type=int, metavar="N", help="length of the other windows")
    parser.add_argument("--cool-down", type=int, metavar="N", help="steps at falling rates")
    parser.add_argument("--ahead-steps", type=int, metavar="N", help="those that look further ahead")
    parser.add_argument("--significant-bits", type=int, metavar="N", help="of the stored weights")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="the highest")
    parser.add_argument("--teacher", type=Path, metavar="FOLDER", help="a target to prune and to learn from")
    parser.add_argument("--state", type=Path, metavar="FILE", help="an interrupted training goes on from it")
    return parser


def main() -> None:
    """Run the command."""
    arguments = parser().parse_args()
    # Imported late: --help should not wait for torch and transformers.
    from benchmarks.demo import byte_target, corpus

    text = corpus.load_file(arguments.text) if arguments.text else corpus.load(arguments.also)
    print(f"corpus: {text.files} files, {text.bytes} bytes, sha256 {text.sha256}", flush=True)
    width = arguments.hidden_size or byte_target.HIDDEN_SIZE
    config = byte_target.target_config(
        arguments.layers or byte_target.LAYERS,
        arguments.intermediate_size or byte_target.INTERMEDIATE_SIZE,
        width,
        arguments.positions or byte_target.LONG,
    )
    given = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(byte_target.Recipe)}
    rate = byte_target.LEARNING_RATE * math.sqrt(byte_target.HIDDEN_SIZE / width)
    given["learning_rate"] = arguments.learning_rate or rate
    recipe = byte_target.Recipe(**{name: value for name, value in given.items() if value is not None})
    started = time.monotonic()
    teacher = byte_target.load(arguments.teacher) if arguments.teacher else None
    model = byte_target.train(text, config, recipe, arguments.state, teacher)
    byte_target.save(model, arguments.out, bits=arguments.significant_bits)
    if arguments.state:
        arguments.state.unlink(missing_ok=True)
    library = LIBRARY + arguments.about
    record = describe(
        arguments.out,
        text,
        steps={
            **dataclasses.asdict(recipe),
            "long_window": config.max_position_embeddings,
            "significant_bits": arguments.significant_bits,
            "products": "bfloat16" if byte_target.HAS_BFLOAT16 else "float32",
            "teacher": json.loads((arguments.teacher / "provenance.json").read_text()) if teacher else None,
        },
        data=f"{arguments.text.name} as bytes; its last 1/{corpus.HOLDOUT} held out" if arguments.text else library,
        minutes=(time.monotonic() - started) / 60,
    )
    results = record["figures"]
    print(f"target: {results['bits_per_byte']:.4f} bits/byte on held-out text, {results['minutes']} minutes")


def describe(folder: Path, text: Any, steps: dict[str, Any], data: str, minutes: float) -> dict[str, Any]:
    """Measures the saved target, writes README.md and provenance.json, and returns the latter's values."""
    from benchmarks.demo import byte_target
    from vllm_mtpc.files import replace_file

    model = byte_target.load(folder)
    results = {
        "bits_per_byte": byte_target.bits_per_byte(model, text.valid, steps["short_window"], LOSS_BYTES),
        "bits_per_byte_long": byte_target.bits_per_byte(model, text.valid, steps["long_window"], LOSS_BYTES),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "minutes": round(minutes, 1),
    }
    settings = {**steps, "loss_bytes": LOSS_BYTES}
    about = {"data": {"description": data}, "settings": settings, "figures": results}
    record = byte_target.write_record(folder, parser().prog, text, **about)
    replace_file(folder / "README.md", card(record).encode())
    return record


def card(record: dict[str, Any]) -> str:
    """README.md of a target."""
    results, data, settings = record["figures"], record["data"], record["settings"]
    bits = settings.get("significant_bits")
    significant = f", {bits} of them significant," if bits else ""
    ahead = origin = ""
    if count := settings.get("ahead_steps"):
        ahead = f" In the last {count} steps its states also predict 7 further tokens, by layers that are not kept."
    if teacher := settings.get("teacher"):
        size, loss = teacher["figures"]["parameters"] / 1e6, teacher["figures"]["bits_per_byte"]
        origin = (
            f"\n- Pruned from a target of {size:.2f}M parameters and {loss:.4f} bits per byte, and taught by its\n"
            "  distributions."
        )
    licence = " The\n  Python standard library is under the PSF License." if LIBRARY in data["description"] else ""
    return f"""\
---
library_name: vllm
pipeline_tag: text-generation
tags: [byte-level, demo]
license: apache-2.0
---
# Demo target

A byte-level Llama with {results["parameters"] / 1e6:.2f}M parameters that writes text like its training data. It exists
so that speculative decoding can be tried and tested without a download; it is of no use as a language model. Token ids
0 to 255 are bytes, 256 is `<|endoftext|>`. Weights are stored in 16 bits{significant} and meant to be
computed in float32.

| held-out text, windows of | bits per byte |
|---|---|
| {settings["short_window"]} bytes | {results["bits_per_byte"]:.4f} |
| {settings["long_window"]} bytes | {results["bits_per_byte_long"]:.4f} |

Each window is read without earlier context; {settings["loss_bytes"]} bytes at most, measured in float32 on the stored
weights.

- Data: {data["description"]}; {data["files"]} files, {data["bytes"]} bytes, SHA-256 `{data["sha256"]}`.{licence}
- Training: {settings["steps"]} steps of {settings["tokens_per_step"]} bytes, of which {settings["long_steps"]}
  in the second half on windows of {settings["long_window"]}; {settings["products"]} matrix products;
  seed {record["seed"]}; {results["minutes"]:.0f} minutes.{ahead}{origin}
- Command: `{record["command"]}`
"""


if __name__ == "__main__":
    main()
