"""Decoding loops on a target with a key-value cache: plain, drafted without verification, and as a server does it.

- ``stp``: one token per forward of the target.
- ``mtp``: x_1 from the target, drafts behind it, all kept. Nothing is verified, so the text is not the target's;
  tokens/step is the ceiling, and what it costs is the text's bits per token under the target.
- ``speculative``: the serving rule. Drafts are verified by the target, the leading ones that it accepts are kept, and
  the token that ends a step is the next x_1. The distribution of the text is the target's, greedy text is ``stp``'s.

How a step drafts and verifies is a ``Drafting`` of the head's family: rejection sampling (``acceptance.Rejection``) or
coupling (``coupling.Coupling``). What is here is theirs in common: the steps, where a text ends, what is counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.metrics import Metrics
from vllm_mtpc.eval.text import stop_ids
from vllm_mtpc.hf import Session, Target

MODES = ("stp", "mtp", "speculative")


class Drafting(Protocol):
    """How a family drafts and verifies; of one text after another."""

    num_drafts: int  # K

    def start(self, session: Session, hidden: Tensor, length: int) -> Tensor:
        """x_1 [1] of a further text of which ``session`` has read ``length`` tokens, the last one with hidden[1, D]."""

    def step(self, mode: str, hidden: Tensor, first: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
        """Drafts [K] behind x_1 first[1] at hidden[1, D] (none in mode stp), how many are kept, the next x_1 [1], and
        the states [1 + K, D] of x_1 and the drafts, all of which have been read."""


@dataclass
class Decoded:
    """One text and what it took. A step: a forward of the target behind the one that reads the prompt."""

    tokens: list[int] = field(default_factory=list)  # the continuation, its end-of-text token included
    accepted: list[int] = field(default_factory=list)  # drafts kept in each step, also where the text ends within
    nats: list[float] = field(default_factory=list)  # -log p of each token under the target at temperature 1
    num_drafts: int = 0
    prompt_seconds: float = 0.0  # the forward that reads the prompt
    seconds: float = 0.0  # everything behind it

    @property
    def steps(self) -> int:
        return len(self.accepted)

    @property
    def tokens_per_step(self) -> float:
        """The target's own token included; plain decoding is 1.0."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0

    def statistics(self) -> dict[str, Any]:
        """What `vllm-mtpc generate` prints and writes; times in seconds, bits under the target at temperature 1."""
        steps, drafts, kept = self.steps, self.num_drafts, self.accepted
        return {
            "num_tokens": len(self.tokens),
            "steps": steps,
            "tokens_per_step": self.tokens_per_step,
            # P(drafts 1..k are all kept), k = 1..K, over steps
            "acceptance_per_position": [sum(n >= k for n in kept) / max(1, steps) for k in range(1, drafts + 1)],
            # steps by the tokens they gained, 0..1 + K (index 0 is always empty: the target's token comes for free)
            "histogram": [sum(1 + n == tokens for n in kept) for tokens in range(drafts + 2)],
            # of the tokens behind the first one, which comes with the prompt
            "tokens_per_second": (len(self.tokens) - 1) / self.seconds if self.seconds else 0.0,
            "seconds_per_call": self.seconds / steps if steps else 0.0,
            "prompt_seconds": self.prompt_seconds,
            "bits_per_token": bits([self]),
        }


@torch.inference_mode()
def decode(
    mode: str,
    session: Session,
    prompt: Tensor,
    drafting: Drafting,
    new_tokens: int,
    stops: Collection[int] = (),
    show: Callable[[Sequence[int]], object] = lambda tokens: None,
) -> Decoded:
    """Continues prompt[P] (at least one token) by up to ``new_tokens`` tokens in a session that has read nothing.

    ``stops``: tokens that end the text. ``show`` is given the tokens as they come. Raises UsageError for another mode.
    """
    if mode not in MODES:
        raise UsageError(f"mode {mode!r}: allowed are {', '.join(MODES)}")
    done = Decoded(num_drafts=0 if mode == "stp" else drafting.num_drafts)
    started = time.perf_counter()
    states = session.start([prompt])  # [1, P, D]
    done.prompt_seconds = time.perf_counter() - started
    started = time.perf_counter()
    hidden = states[:, -1]  # [1, D]: the last token that belongs to the text

    def emit(tokens: Sequence[int], hidden: Tensor) -> bool:
        """Adds tokens whose predicting states are hidden[len, D]; whether the text goes on."""
        room = new_tokens - len(done.tokens)
        stop = next((at + 1 for at, token in enumerate(tokens) if token in stops), len(tokens))
        kept = list(tokens[: min(room, stop)])
        log_p = session.logits(hidden[: len(kept)]).log_softmax(-1)
        done.nats += (-log_p[range(len(kept)), kept]).tolist()
        done.tokens += kept
        show(kept)
        return len(done.tokens) < new_tokens and not any(token in stops for token in kept)

    first = drafting.start(session, hidden, states.shape[1])
    goes_on = emit(first.tolist(), hidden)
    while goes_on:
        drafts, accepted, first, read = drafting.step(mode, hidden, first)
        done.accepted.append(accepted)
        session.crop(len(drafts) - accepted)
        hidden = read[accepted : accepted + 1]
        goes_on = emit([*drafts[:accepted].tolist(), int(first)], read)
    done.seconds = time.perf_counter() - started
    return done


def continue_all(
    mode: str, target: Target, prompts: Sequence[Tensor], drafting: Drafting, new_tokens: int, label: str | None = None
) -> list[Decoded]:
    """Every prompt continued, one after the other, up to the target's own stop tokens; ``label``: of a progress bar."""
    stops = stop_ids(target)
    bar = tqdm(prompts, desc=label, unit="text", disable=None if label else True)
    return [decode(mode, Session(target), prompt, drafting, new_tokens, stops) for prompt in bar]


def counted(texts: Sequence[Decoded]) -> Metrics:
    """Metrics of decoded texts; s.e. over texts. Raises UsageError where none of them took a step."""
    steps = torch.tensor([text.steps for text in texts], dtype=torch.float64)
    if not steps.sum():
        raise UsageError(
            "every text ended with its first token, so no step was drafted; raise the number of new tokens"
        )
    accepted = [torch.tensor(text.accepted, dtype=torch.long) for text in texts]
    tokens = steps + torch.stack([counts.sum() for counts in accepted])
    histogram = torch.bincount(torch.cat(accepted), minlength=texts[0].num_drafts + 1)
    more = {"anywhere": math.nan, "contexts": int(steps.sum())}  # steps start where they start
    return Metrics.of(steps, tokens, histogram, target_bits=bits(texts), **more)


def bits(texts: Sequence[Decoded]) -> float:
    """Bits per token of the texts under the target at temperature 1."""
    nats = [value for text in texts for value in text.nats]
    return sum(nats) / len(nats) / math.log(2)
