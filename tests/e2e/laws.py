"""The exact law of what a tiny target says, and how far a sample may be from it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM

# One false alarm in about 3 million runs for a normal statistic; seeds are fixed, so a test that
# passed once passes again.
SIGMAS = 5.0


@dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_p: float = 1.0

    def sampling(self) -> dict:
        return {"temperature": self.temperature, "top_p": self.top_p}


@torch.no_grad()
def exact_law(model: LlamaForCausalLM, prompt: list[int], length: int, setting: Setting) -> np.ndarray:
    """Probabilities [V ** length] of all continuations, in lexicographic order, float64."""
    vocab_size = model.config.vocab_size
    sequences = torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))
    tokens = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], dim=1)
    logits = model(tokens).logits[:, len(prompt) - 1 : -1].double()  # [S, length, V]
    probs = _processed(logits, setting).gather(2, sequences[..., None])[..., 0]
    return probs.prod(dim=1).numpy()


def _processed(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Temperature, then nucleus: the smallest set of most probable tokens with mass >= top_p."""
    probs = (logits / setting.temperature).softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True)
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
    """The law of the two tokens in the middle of four, for runs too short to fill every cell."""
    return law.reshape((vocab_size,) * 4).sum(axis=(0, 3)).ravel()


def noise_floor(law: np.ndarray, count: int) -> float:
    """Largest total variation that `count` exact draws show by chance: mean + SIGMAS deviations, simulated."""
    law = law / law.sum()
    counts = np.random.default_rng(0).multinomial(count, law, size=200)
    distances = np.abs(counts / count - law).sum(axis=1) / 2
    return float(distances.mean() + SIGMAS * distances.std())
