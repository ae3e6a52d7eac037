"""The exact distribution of the texts of a tiny target, and the largest distance of a sample from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaForCausalLM

from tests.support.engine import Call, Reply

# One false alarm in about 3 million runs for a normal statistic; seeds are fixed, so a test that
# passed once passes again.
SIGMAS = 5.0
PREFIXES = (1, 2, 3, 4)  # tokens of the marginals that are compared besides the whole texts
LEVEL = 1e-6  # of all of them together


AT_ONCE = 50  # answers of one request: vLLM looks at its parameters once, a millisecond and more


def asking(
    prompt: list[int], sampling: dict[str, Any] | Sequence[dict[str, Any]], count: int, at_once: int = AT_ONCE
) -> Call:
    """`count` independent answers to a prompt, a multiple of at_once; of several kinds of request: for each, in turns.

    A seed is that of the first request of its kind; answers of one request have seeds that follow each other.
    """
    assert count % at_once == 0
    kinds = [sampling] if isinstance(sampling, dict) else sampling
    asked = [request for turn in range(count // at_once) for kind in kinds for request in _turn(kind, turn, at_once)]
    return Call([prompt] * len(asked), asked)


def _turn(kind: dict[str, Any], turn: int, at_once: int) -> list[dict[str, Any]]:
    """The requests for at_once answers. vLLM takes greedy requests for one answer alone."""
    if kind.get("temperature") == 0:
        return [kind] * at_once
    return [{**kind, "n": at_once, **({"seed": kind["seed"] + turn * at_once} if "seed" in kind else {})}]


def draws_of(reply: Reply) -> list[list[int]]:
    """All answers of a call."""
    return [sample for samples in reply.tokens for sample in samples]


def draws_by_kind(reply: Reply, kinds: int, at_once: int = AT_ONCE) -> list[list[list[int]]]:
    """Answers of a call by kind of request, in the order in which `asking` was given the kinds."""
    draws = draws_of(reply)
    return [[text for at, text in enumerate(draws) if at // at_once % kinds == kind] for kind in range(kinds)]


UNLIKE_VLLM = ("bad_word", "allowed", "stop", "drafts")


@dataclass(frozen=True)
class Setting:
    """What a request asks for. bad_word, allowed: token ids. stop: ends a text of at least min_tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_word: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    min_tokens: int = 0
    stop: int | None = None
    seed: int | None = None
    drafts: int | None = None  # asked for; None: as many as the engine makes

    def sampling(self) -> dict[str, Any]:
        """Arguments of SamplingParams; words are spelled as `models.make_tokenizer` does."""
        given = {name: value for name, value in vars(self).items() if name not in UNLIKE_VLLM}
        if self.seed is None:
            del given["seed"]
        if self.bad_word:
            given["bad_words"] = ["".join(chr(ord("a") + token) for token in self.bad_word)]
        if self.allowed:
            given["allowed_token_ids"] = list(self.allowed)
        if self.stop is not None:
            given["stop_token_ids"] = [self.stop]
        if self.drafts is not None:
            given["extra_args"] = {"mtpc_drafts": self.drafts}
        return {**given, "ignore_eos": True, "detokenize": False}


SETTINGS = {
    "T=1": Setting(),
    "T=0.7": Setting(temperature=0.7),
    "T=0.3, top-p 0.9": Setting(temperature=0.3, top_p=0.9),
    "T=1.3, top-p 0.8": Setting(temperature=1.3, top_p=0.8),
    "top-k 2": Setting(top_k=2),
    "greedy": Setting(temperature=0.0),
    "presence": Setting(presence_penalty=1.5),
    "repetition": Setting(repetition_penalty=2.0),
    "frequency": Setting(frequency_penalty=1.5),
    "bad words": Setting(bad_word=(0, 1)),
    "allowed ids": Setting(allowed=(0, 2)),
    "min_tokens, stop": Setting(min_tokens=3, stop=2),
    "seeded": Setting(seed=1000),
}
MIXED = tuple(SETTINGS)  # 13 kinds of request
SETTINGS["T=0.7, top-p 0.9"] = Setting(temperature=0.7, top_p=0.9)
SETTINGS |= {f"{count} drafts": Setting(drafts=count) for count in range(3)}
# the rows of benchmarks/FEATURES.md that the settings' distributions speak for
FEATURES = ("temperature", "top_k", "top_p", "presence penalty", "frequency penalty", "repetition penalty")
FEATURES += ("bad_words", "allowed_token_ids", "min_tokens", "stop_token_ids")


@torch.no_grad()
def exact_distribution(model: LlamaForCausalLM, prompt: list[int], length: int, setting: Setting) -> np.ndarray:
    """Probabilities [V ** length] of all texts, in lexicographic order, float64; one that has ended goes on with 0."""
    vocab_size = model.config.vocab_size
    sequences = torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))
    tokens = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], dim=1)
    logits = model(tokens).logits[:, len(prompt) - 1 : -1].double()  # [S, length, V]
    logits = _forbidden(_penalised(logits, prompt, sequences, setting), sequences, setting)
    probs = _processed(logits, setting).gather(2, sequences[..., None])[..., 0]
    if setting.stop is not None:
        ended = (sequences == setting.stop).cumsum(1) - (sequences == setting.stop).long() > 0
        probs = torch.where(ended, (sequences == 0).double(), probs)
    return probs.prod(dim=1).numpy()


def _penalised(logits: torch.Tensor, prompt: list[int], sequences: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Presence and frequency count the tokens before the position, repetition the prompt too."""
    tokens = torch.nn.functional.one_hot(sequences, logits.shape[-1])
    counts = tokens.cumsum(1) - tokens
    seen = counts > 0
    seen[..., prompt] = True
    repeated = torch.where(logits > 0, logits / setting.repetition_penalty, logits * setting.repetition_penalty)
    logits = torch.where(seen, repeated, logits)
    return logits - setting.frequency_penalty * counts - setting.presence_penalty * (counts > 0)


def _forbidden(logits: torch.Tensor, sequences: torch.Tensor, setting: Setting) -> torch.Tensor:
    """-inf where a token is not allowed, would end a bad word (in the answer, not in the prompt), or ends too early."""
    is_out = torch.zeros_like(logits, dtype=torch.bool)
    if setting.allowed:
        is_out[..., [token for token in range(logits.shape[-1]) if token not in setting.allowed]] = True
    if setting.stop is not None:
        is_out[:, : setting.min_tokens, setting.stop] = True
    if setting.bad_word:
        *start, last = setting.bad_word
        for k in range(len(start), sequences.shape[1]):
            is_out[:, k, last] |= (sequences[:, k - len(start) : k] == torch.tensor(start)).all(dim=1)
    return logits.masked_fill(is_out, -torch.inf)


def _processed(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Temperature, the top_k most probable, then the nucleus: the fewest most probable tokens with mass >= top_p."""
    if setting.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    probs = (logits / setting.temperature).softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True)
    ordered[..., setting.top_k or ordered.shape[-1] :] = 0.0
    ordered /= ordered.sum(-1, keepdim=True)
    outside = ordered.cumsum(-1) - ordered >= setting.top_p
    kept = ordered.masked_fill(outside, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


def total_variation(draws: Sequence[Sequence[int]], distribution: np.ndarray, vocab_size: int) -> float:
    """Distance of the draws' empirical distribution from `distribution`, in [0, 1]; a text that has ended goes on with
    0."""
    length = round(np.log(len(distribution)) / np.log(vocab_size))
    padded = np.array([[*draw, *[0] * (length - len(draw))] for draw in draws])
    index = padded @ (vocab_size ** np.arange(length)[::-1])
    empirical = np.bincount(index, minlength=len(distribution)) / len(draws)
    return float(np.abs(empirical - distribution).sum() / 2)


def of_the_first(distribution: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """The distribution of the first `length` tokens, for runs too short to fill every cell."""
    return distribution.reshape(vocab_size**length, -1).sum(axis=1)


def noise_floor(distribution: np.ndarray, count: int) -> float:
    """Largest total variation that `count` exact draws show by chance: mean + SIGMAS deviations, simulated."""
    distribution = distribution / distribution.sum()
    counts = np.random.default_rng(0).multinomial(count, distribution, size=200)
    distances = np.abs(counts / count - distribution).sum(axis=1) / 2
    return float(distances.mean() + SIGMAS * distances.std())


class Comparison(NamedTuple):
    """Draws against a distribution, of their first `tokens` tokens."""

    tokens: int
    distance: float
    floor: float


def prefix_floor(distribution: np.ndarray, count: int) -> float:
    """Largest total variation of a marginal of few cells by chance: mean + McDiarmid's bound at LEVEL.

    One draw changes the total variation by 1 / count at most, so it exceeds its mean by t with probability
    exp(-2 count t^2) at most. The tail of few cells is heavier than that of a normal distribution.
    """
    distribution = distribution / distribution.sum()
    counts = np.random.default_rng(0).multinomial(count, distribution, size=200)
    mean = np.abs(counts / count - distribution).sum(axis=1).mean() / 2
    return float(mean + np.sqrt(np.log(len(PREFIXES) / LEVEL) / (2 * count)))


def compare(draws: Sequence[Sequence[int]], distribution: np.ndarray, vocab_size: int) -> Comparison:
    """Compare the marginals of the first tokens and the whole texts; returns the one that exceeds its floor most."""
    length, found = round(np.log(len(distribution)) / np.log(vocab_size)), list[Comparison]()
    for tokens in (*(one for one in PREFIXES if one < length), length):
        marginal = of_the_first(distribution, tokens, vocab_size)
        floor = (noise_floor if tokens == length else prefix_floor)(marginal, len(draws))
        distance = total_variation([draw[:tokens] for draw in draws], marginal, vocab_size)
        found.append(Comparison(tokens, distance, floor))
    return max(found, key=lambda one: one.distance / one.floor if one.floor else 0.0)


def is_distributed(draws: Sequence[Sequence[int]], distribution: np.ndarray, vocab_size: int) -> bool:
    """Whether draws are as close to `distribution` as exact draws are."""
    found = compare(draws, distribution, vocab_size)
    print(f"{len(draws)} draws, first {found.tokens} tokens: TV {found.distance:.5f}, allowed {found.floor:.5f}")
    return found.distance < found.floor


def biased(distribution: np.ndarray, vocab_size: int, position: int, share: float) -> np.ndarray:
    """The distribution with a share of the mass at one token moved from its likeliest to its least likely id."""
    cells = distribution.reshape(vocab_size**position, vocab_size, -1).copy()
    mass = cells.sum(axis=(0, 2))
    top, low = mass.argmax(), mass.argmin()
    moved = cells[:, top] * min(1.0, share / mass[top])
    cells[:, top] -= moved
    cells[:, low] += moved
    return cells.ravel()


def power(distribution: np.ndarray, vocab_size: int, position: int, share: float, count: int, runs: int = 100) -> float:
    """How often `count` draws of the biased distribution are found to be of another one, simulated."""
    generator, wrong = np.random.default_rng(0), biased(distribution, vocab_size, position, share)
    length = round(np.log(len(distribution)) / np.log(vocab_size))
    parts = [of_the_first(distribution, tokens, vocab_size) for tokens in (*PREFIXES, length)]
    floors = [*(prefix_floor(part, count) for part in parts[:-1]), noise_floor(parts[-1], count)]
    found = 0
    for counts in generator.multinomial(count, wrong / wrong.sum(), size=runs):
        own = [of_the_first(counts / count, tokens, vocab_size) for tokens in (*PREFIXES, length)]
        distances = [np.abs(a - b).sum() / 2 for a, b in zip(own, parts, strict=True)]
        found += any(a > b for a, b in zip(distances, floors, strict=True))
    return found / runs
