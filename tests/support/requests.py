"""Prompts, schemas and options of end-to-end tests, and the comparison of logprobs."""

from __future__ import annotations

import math
from typing import Any

import pytest

CODE = (
    b'def read(path):\n    """Return the text of a file."""\n    with open(path) as file:\n        return file.read()\n'
)
LENGTHS = (5, 9, 14, 21, 30, 47, 70, 100)  # the last three exceed the step's token budget


def prompt(length: int, start: int = 0) -> list[int]:
    return list(CODE[start : start + length])


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
EOS = 256
HEADS = {"mtpc": "btree", "ptp": "o-ptp"}  # of the demo
SPEC: dict[str, dict[str, Any]] = {
    "mtpc": {"method": "mtpc"},
    "ptp": {"method": "ptp", "num_speculative_tokens": 3, "max_aux_rows": 48},
}
ALL_DRAFTS = {"num_speculative_tokens_per_batch_size": "off"}  # no plan
COLUMNS = [
    ("v1", "mtpc"),
    # interpreted kernels are slow: in every run test_matrix.py has the other runner
    pytest.param("v2", "mtpc", marks=pytest.mark.slow),
    pytest.param("v2", "ptp", marks=pytest.mark.slow),
]

# prompts that are read in pieces, found in the prefix cache, preempted
VOCAB, LONGEST = 48, 96
PROMPTS = [[3, 9, 4], [7, 7, 1, 12, 5, 2, 30, 41] * 3, [8], [20, 21, 22, 23, 24]]
SMALL = {
    "skip_tokenizer_init": True,
    "max_model_len": LONGEST,
    "max_num_seqs": 4,
    "block_size": 32,
    "max_num_batched_tokens": 16,
}


def same_logprobs(plain: list[Any], ours: list[Any]) -> None:
    assert len(plain) == len(ours) > 2
    for theirs, mine in zip(plain, ours, strict=True):
        assert (theirs is None) == (mine is None)
        if mine is not None:
            assert mine.keys() == theirs.keys()
            # float32 passes over one row and over several sum in another order
            assert all(math.isclose(mine[token].logprob, theirs[token].logprob, abs_tol=1e-3) for token in mine)
