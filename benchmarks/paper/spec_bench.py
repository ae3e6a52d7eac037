"""The questions of Spec-Bench by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError

FILE = provenance.ROOT.parent / "shared" / "data" / "spec_bench.jsonl"
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # all others are conversations of two turns
CONVERSATION = "conversation"


class Question(NamedTuple):
    """task: one of TASKS, or CONVERSATION."""

    task: str
    turns: list[str]


def questions(file: Path) -> list[Question]:
    """All of the file. Raises UsageError where it is missing."""
    if not file.is_file():
        raise UsageError(f"{file.name} is missing: put Spec-Bench's questions, its question.jsonl, there")
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Question(one["category"] if one["category"] in TASKS else CONVERSATION, one["turns"]) for one in records]
