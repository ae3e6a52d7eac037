"""Decoding on a target with a key-value cache: plain, with unverified drafts, and with speculative decoding.

- ``stp``: one token per forward of the target.
- ``mtp``: x_1 from the target, followed by drafts that are all kept. Nothing is verified, so the text is not the
  target's: tokens/step is an upper bound, and its price is more bits per token under the target.
- ``speculative``: the serving rule. The target verifies the drafts, the leading accepted ones are kept, and the token
  that ends a step is the next x_1. The text has the target's distribution; greedy text equals that of ``stp``.

The head's family drafts and verifies by a ``Drafting``: rejection sampling (``acceptance.Rejection``) or coupling
(``ptp_acceptance.Coupling``). This module runs the steps, ends the text, and counts.
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
    """Drafting and verification of a family, for one text after another."""

    num_drafts: int  # K

    def start(self, session: Session, hidden: Tensor, length: int) -> Tensor:
        """Return x_1 [1] of a new text; ``session`` has read ``length`` tokens, the last one with hidden[1, D]."""

    def step(self, mode: str, hidden: Tensor, first: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
        """Draft and verify after x_1 = first[1] at hidden[1, D].

        Returns:
            Drafts [K] (none in mode stp), the number of kept drafts, the next x_1 [1], and the states [1 + K, D] of
            x_1 and the drafts, which the session has read.
        """


@dataclass
class Decoded:
    """One text with its counters. A step is a forward pass of the target after the one that reads the prompt."""

    tokens: list[int] = field(default_factory=list)  # the continuation, its end-of-text token included
    accepted: list[int] = field(default_factory=list)  # drafts kept in each step, also where the text ends within
    nats: list[float] = field(default_factory=list)  # -log p of each token under the target at temperature 1
    num_drafts: int = 0
    prompt_seconds: float = 0.0  # the forward that reads the prompt
    seconds: float = 0.0  # all steps

    @property
    def steps(self) -> int:
        return len(self.accepted)

    @property
    def tokens_per_step(self) -> float:
        """The target's own token included; plain decoding is 1.0."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of `vllm-mtpc generate`; times in seconds, bits under the target at temperature 1."""
        steps, drafts, kept = self.steps, self.num_drafts, self.accepted
        return {
            "num_tokens": len(self.tokens),
            "steps": steps,
            "tokens_per_step": self.tokens_per_step,
            # P(drafts 1..k are all kept), k = 1..K, over steps
            "acceptance_per_position": [sum(n >= k for n in kept) / max(1, steps) for k in range(1, drafts + 1)],
            # steps by their number of tokens, 0..1 + K (index 0 is always 0: each step has the target's token)
            "histogram": [sum(1 + n == tokens for n in kept) for tokens in range(drafts + 2)],
            # without the first token, which the prompt's forward pass gives
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
    """Continue prompt[P], P >= 1, by up to ``new_tokens`` tokens in a new session.

    ``stops``: tokens that end the text. ``show`` receives new tokens after each step. Raises UsageError for an unknown
    mode.
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
        """Append tokens, which hidden[len, D] predict; return whether the text continues."""
        left = new_tokens - len(done.tokens)
        stop = next((at + 1 for at, token in enumerate(tokens) if token in stops), len(tokens))
        kept = list(tokens[: min(left, stop)])
        log_p = session.logits(hidden[: len(kept)]).log_softmax(-1)
        done.nats += (-log_p[range(len(kept)), kept]).tolist()
        done.tokens += kept
        show(kept)
        return len(done.tokens) < new_tokens and not any(token in stops for token in kept)

    first = drafting.start(session, hidden, states.shape[1])
    continues = emit(first.tolist(), hidden)
    while continues:
        drafts, accepted, first, read = drafting.step(mode, hidden, first)
        done.accepted.append(accepted)
        session.crop(len(drafts) - accepted)
        hidden = read[accepted : accepted + 1]
        continues = emit([*drafts[:accepted].tolist(), int(first)], read)
    done.seconds = time.perf_counter() - started
    return done


def continue_all(
    mode: str, target: Target, prompts: Sequence[Tensor], drafting: Drafting, new_tokens: int, label: str | None = None
) -> list[Decoded]:
    """Continue each prompt up to the target's stop tokens; ``label``: of the progress bar (None: no bar)."""
    stops = stop_ids(target)
    bar = tqdm(prompts, desc=label, unit="text", disable=None if label else True)
    return [decode(mode, Session(target), prompt, drafting, new_tokens, stops) for prompt in bar]


def counted(texts: Sequence[Decoded]) -> Metrics:
    """Return the metrics of decoded texts; s.e. over texts. Raises UsageError where none of them has a step."""
    steps = torch.tensor([text.steps for text in texts], dtype=torch.float64)
    if not steps.sum():
        raise UsageError(
            "every text ended with its first token, so no step was drafted; raise the number of new tokens"
        )
    accepted = [torch.tensor(text.accepted, dtype=torch.long) for text in texts]
    tokens = steps + torch.stack([counts.sum() for counts in accepted])
    histogram = torch.bincount(torch.cat(accepted), minlength=texts[0].num_drafts + 1)
    more = {"anywhere": math.nan, "contexts": int(steps.sum())}  # only known for texts of the target
    return Metrics.of(steps, tokens, histogram, target_bits=bits(texts), **more)


def bits(texts: Sequence[Decoded]) -> float:
    """Return the bits per token of the texts under the target at temperature 1."""
    nats = [value for text in texts for value in text.nats]
    return sum(nats) / len(nats) / math.log(2)
