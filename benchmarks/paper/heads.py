"""Heads of the demo target that tables are made of, trained by the package's own trainer on the target's own text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from benchmarks import sweep
from vllm_mtpc import demo
from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.run import settled, train

TEXT = provenance.ROOT / "build" / "demo"
FOLDER = provenance.ROOT / "build" / "paper"
TRIAL = {"max_steps": 3, "evaluation_sequences": 8}


def options(name: str, quick: bool, **given: Any) -> TrainOptions:
    """Of `vllm-mtpc train`, for one head. Raises UsageError where the text is missing."""
    sampled, greedy, held_out = (TEXT / f"{file}.jsonl" for file in ("sampled", "greedy", "heldout"))
    for file in (sampled, greedy, held_out):
        if not file.is_file():
            raise UsageError(f"{file} is missing; type: scripts/train_demo.sh --only text")
    values = {
        "target": str(demo.path("target")),
        "data": [str(sampled), str(greedy)],
        "validation_data": [str(held_out)],
        "seq_len": 160,
        "evaluation_sequences": 256,
        "evaluation_tokens": 96,
        **given,
        **(TRIAL if quick else {}),
        "out": FOLDER / ("quick" if quick else "") / name,
    }
    return sweep.parse(values, name)


@functools.cache
def trained(
    name: str, quick: bool, kind: type[TrainOptions] = TrainOptions, **given: Any
) -> tuple[Path, dict[str, Any]]:
    """A head's folder and its provenance; an existing one with the same options is not trained again.

    kind: options whose job is another one than theirs.
    """
    wanted = settled(options(name, quick, **given))
    if sweep.done(wanted) is None:
        print(f"--- {name}", flush=True)
        train(kind.model_validate(wanted.model_dump(exclude_unset=True)))
    return wanted.out, json.loads((wanted.out / "provenance.json").read_text(encoding="utf-8"))
