"""Inputs of the small kernels, for their tests and for comparing interpreters: couple, leaf, pick and uniform."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support import interpreted


def rows(requests: int, width: int, draft_dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor, int]:
    """Requests of 0 .. width rows and padding; few tokens, so that half of the drafts are right."""
    generator = torch.Generator().manual_seed(requests + width)
    count = torch.randint(width + 1, (requests,), generator=generator)
    cu_num_logits = torch.cat([torch.zeros(1, dtype=torch.long), count.cumsum(0)]).int()
    total = int(count.sum()) + 3
    tokens, drafts = torch.randint(2, (2, total), generator=generator)
    drafts[::11] = -1
    return tokens, drafts.to(draft_dtype), cu_num_logits, width


def with_others(requests: int, width: int) -> tuple[Any, ...]:
    """Two of three are coupled; the others keep 7, 7, ..."""
    others = (torch.arange(requests) % 3 > 0, torch.full((requests, width), 7), torch.full((requests,), 7).int())
    return (*rows(requests, width), others)


HALF, WHOLE = torch.bfloat16, torch.float32


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = WHOLE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def term_case(batch: int, r: int, vocab: int, hidden: int, dtype: torch.dtype) -> tuple:
    """Arguments of `terms`: states with NaN after every row; the first and the last token, and tokens out of range."""
    states = torch.full((batch, hidden + 3), torch.nan, dtype=dtype)[..., :hidden]
    states.copy_(numbers(batch, hidden, dtype=dtype))
    weight = numbers(r, vocab, hidden, seed=1) / hidden**0.5
    token = torch.randint(vocab, (batch,), generator=torch.Generator().manual_seed(batch))
    for row, chosen in enumerate((vocab - 1, 0, -1, vocab, vocab + 5)[:batch]):
        token[row] = chosen
    return states, weight.to(dtype), token


INF, NAN = float("inf"), float("nan")
LARGEST = 1 - 2**-24
SIZES = [(1000, 200), (1, 1), (20, 1), (50, 17), (50, 4096), (50, 4097), (150, 13_000), (5, 150_000)]


def draws(rows: int, vocab: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + vocab)
    logits = torch.randn(rows, vocab, generator=generator) * scale
    u = torch.randint(2**24, (rows,), generator=generator) * 2.0**-24
    u[0] = LARGEST
    return logits, u


def holes(vocab: int = 9000) -> tuple[Tensor, Tensor]:
    """Rows with runs of -inf: at the start, at the end, between, whole blocks, everything but one token; and NaN."""
    logits, _ = draws(30, vocab)
    runs = [(0, 5000), (4096, 8192), (4000, vocab), (100, 8500), (1, vocab), (0, vocab - 1)]
    for row, (start, end) in enumerate(runs):
        logits[5 * row : 5 * row + 5, start:end] = -INF
    logits[20:25, 0] = -30.0  # the only token of its row
    logits[:25:7, vocab - 1] = NAN
    u = torch.tensor([0.0, 0.25, 0.5, 0.999, LARGEST]).repeat(6)
    return logits, u


def strided() -> tuple[Tensor, Tensor]:
    """Rows with other numbers after and between them, large enough to be picked."""
    logits, u = draws(50, 300)
    padded = torch.full((50, 311), 1e4)
    padded[:, :300] = logits
    return padded[:, :300], u


def edges() -> tuple[Tensor, Tensor]:
    """Equal masses, u at every edge: exact in both, so no side may be chosen freely."""
    return torch.zeros(64, 8192), torch.arange(64) / 64


def uniforms() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    extremes = torch.tensor([-(2**63), -(2**32), -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
    seed = torch.cat([extremes, torch.randint(-(2**63), 2**63 - 1, (5000,), generator=generator)])
    pos = torch.cat([extremes.flip(0), torch.arange(5000)])
    return seed, pos


def selected(rows: int, vocab: int, trust: float | None, dtype: torch.dtype = WHOLE) -> tuple[Any, ...]:
    """Rows of six request slots, one of them greedy; runs of -inf in every fifth row."""
    generator = torch.Generator().manual_seed(9)
    logits = draws(rows, vocab)[0].to(dtype)
    logits[::5, vocab // 3 : vocab - 2] = -INF
    slots = torch.randint(6, (rows,), generator=generator, dtype=torch.int32)
    seeds = torch.randint(-(2**63), 2**63 - 1, (6,), generator=generator)
    temperature = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 0.7])
    return logits, slots, torch.arange(3, 3 + rows), seeds, temperature, trust


CASES: dict[str, interpreted.Case] = {
    "width 8": ("couple", rows(60, 8)),
    "width 2, int32": ("couple", rows(20, 2, torch.int32)),
    "width 17": ("couple", rows(40, 17)),
    "width 1": ("couple", rows(5, 1)),
    "next to others": ("couple", with_others(30, 8)),
    "no requests": ("couple", rows(0, 4)),
    "all right": ("couple", (torch.ones(9, dtype=torch.long), torch.ones(9), torch.tensor([0, 4, 8]), 4)),
    # 64 rows of a vocabulary and up to 64 states are one tile; 128 (half precision) or 32 elements of D at a time
    "one": ("leaf", term_case(1, 1, 5, 16, WHOLE)),
    "a block but one": ("leaf", term_case(3, 2, 63, 33, WHOLE)),
    "a block": ("leaf", term_case(5, 3, 64, 32, WHOLE)),
    "more blocks than one": ("leaf", term_case(17, 2, 257, 130, HALF)),
    "more states than a tile has": ("leaf", term_case(65, 2, 70, 16, HALF)),
    "half": ("leaf", term_case(3, 2, 65, 40, torch.float16)),
    **{f"{rows}x{vocab}": ("pick", draws(rows, vocab)) for rows, vocab in SIZES},
    "peaked": ("pick", draws(200, 5000, scale=20.0)),
    "holes": ("pick", holes()),
    "strided": ("pick", strided()),
    "edges": ("pick", edges()),
    "empty rows": ("pick", (torch.tensor([[-INF] * 5000, [NAN] * 5000]), torch.tensor([0.0, LARGEST]))),
    "bfloat16": ("pick", (draws(100, 500)[0].bfloat16(), draws(100, 500)[1])),
    "no rows": ("pick", (torch.zeros(0, 7), torch.zeros(0))),
    "alone": ("pick", tuple(part[7:8] for part in draws(150, 13_000))),
    "picks": ("pick:select_tokens", selected(80, 9000, None)),
    "picks of bfloat16": ("pick:select_tokens", selected(40, 300, None, HALF)),
    "no trust": ("pick:select_tokens", selected(60, 2500, 0.001)),
    "trust": ("pick:select_tokens", selected(120, 2500, 0.87)),
    "trust of bfloat16": ("pick:select_tokens", selected(60, 300, 0.6, HALF)),
    "full trust": ("pick:select_tokens", selected(60, 1024, 0.9999)),
    "uniform": ("uniform", uniforms()),
    "int32 positions": ("uniform", (torch.arange(2000), torch.arange(2000, dtype=torch.int32))),
    "none": ("uniform", (torch.zeros(0, dtype=torch.int64),) * 2),
}
