"""The exact law of what a tiny target says, and how far a sample may be from it."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.e2e.engine import Call, Reply

# One false alarm in about 3 million runs for a normal statistic; seeds are fixed, so a test that
# passed once passes again.
SIGMAS = 5.0


AT_ONCE = 50  # answers of one request: vLLM looks at its parameters once, a millisecond and more


def asking(prompt: list[int], sampling: dict[str, Any], count: int) -> Call:
    """`count` independent answers to a prompt; a multiple of AT_ONCE."""
    assert count % AT_ONCE == 0
    requests = count // AT_ONCE
    return Call([prompt] * requests, [{**sampling, "n": AT_ONCE}] * requests)


def draws_of(reply: Reply) -> list[list[int]]:
    """All answers of a call."""
    return [sample for samples in reply.tokens for sample in samples]


@dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def sampling(self) -> dict:
        return asdict(self)


SETTINGS = {
    "T=1": Setting(),
    "T=0.7": Setting(temperature=0.7),
    "top-k 3": Setting(top_k=3),
    "top-p 0.8": Setting(top_p=0.8),
    "presence": Setting(presence_penalty=1.5),
    "frequency": Setting(frequency_penalty=1.5),
    "repetition": Setting(repetition_penalty=2.0),
}
# the row of docs/features.md that a setting's law speaks for
ROWS = {
    "T=1": "temperature",
    "T=0.7": "temperature",
    "top-k 3": "top_k",
    "top-p 0.8": "top_p",
    **{name: f"{name} penalty" for name in ("presence", "frequency", "repetition")},
}


def law_of(name: str, *, is_slow: bool = True) -> Any:
    """A setting as a parameter of a test of its law."""
    marks = [pytest.mark.feature(ROWS[name], "law"), *([pytest.mark.slow] if is_slow else [])]
    return pytest.param(SETTINGS[name], id=name, marks=marks)


@torch.no_grad()
def exact_law(model: LlamaForCausalLM, prompt: list[int], length: int, setting: Setting) -> np.ndarray:
    """Probabilities [V ** length] of all continuations, in lexicographic order, float64."""
    vocab_size = model.config.vocab_size
    sequences = torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))
    tokens = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], dim=1)
    logits = model(tokens).logits[:, len(prompt) - 1 : -1].double()  # [S, length, V]
    probs = _processed(_penalised(logits, prompt, sequences, setting), setting).gather(2, sequences[..., None])[..., 0]
    return probs.prod(dim=1).numpy()


def _penalised(logits: torch.Tensor, prompt: list[int], sequences: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Presence and frequency count what was said before the position, repetition the prompt too."""
    said = torch.nn.functional.one_hot(sequences, logits.shape[-1])
    counts = said.cumsum(1) - said
    seen = counts > 0
    seen[..., prompt] = True
    repeated = torch.where(logits > 0, logits / setting.repetition_penalty, logits * setting.repetition_penalty)
    logits = torch.where(seen, repeated, logits)
    return logits - setting.frequency_penalty * counts - setting.presence_penalty * (counts > 0)


def _processed(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Temperature, the top_k most probable, then the nucleus: the fewest most probable tokens with mass >= top_p."""
    probs = (logits / setting.temperature).softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True)
    ordered[..., setting.top_k or ordered.shape[-1] :] = 0.0
    ordered /= ordered.sum(-1, keepdim=True)
    outside = ordered.cumsum(-1) - ordered >= setting.top_p
    kept = ordered.masked_fill(outside, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


def total_variation(draws: list[list[int]], law: np.ndarray, vocab_size: int) -> float:
    """Distance of the draws' empirical law from `law`, in [0, 1]."""
    draws = np.asarray(draws)
    index = draws @ (vocab_size ** np.arange(draws.shape[1])[::-1])
    empirical = np.bincount(index, minlength=len(law)) / len(draws)
    return float(np.abs(empirical - law).sum() / 2)


def coarse(law: np.ndarray, vocab_size: int) -> np.ndarray:
    """The law of the second and third token, for runs too short to fill every cell."""
    return law.reshape((vocab_size,) * 3 + (-1,)).sum(axis=(0, 3)).ravel()


def noise_floor(law: np.ndarray, count: int) -> float:
    """Largest total variation that `count` exact draws show by chance: mean + SIGMAS deviations, simulated."""
    law = law / law.sum()
    counts = np.random.default_rng(0).multinomial(count, law, size=200)
    distances = np.abs(counts / count - law).sum(axis=1) / 2
    return float(distances.mean() + SIGMAS * distances.std())
