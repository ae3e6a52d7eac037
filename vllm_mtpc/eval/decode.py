"""Decoding loops on a target with a key-value cache: plain, drafted without verification, and as a server does it.

- ``stp``: one token per forward of the target.
- ``mtp``: x_1 from the target, x_2..x_(1+K) from the circuit, all kept. Nothing is verified, so the text is not the
  target's; tokens/step is the ceiling, and what it costs is the text's bits per token under the target.
- ``speculative``: the serving rule (standard rejection sampling; Leviathan et al., 2023, algorithm 1). A forward of the
  target reads x_1 and its K drafts; drafts are accepted while u < p/q; the token that ends a step, recovered from
  max(p - q, 0) or drawn behind the last draft, is the next x_1. The law of the text is the target's, greedy text is
  ``stp``'s token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.acceptance import circuit_params, num_positions
from vllm_mtpc.eval.sampling import Sampling
from vllm_mtpc.hf.session import Session

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm_mtpc.hf import Target
    from vllm_mtpc.hf.session import Reader

MODES = ("stp", "mtp", "speculative")


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

    @property
    def per_position(self) -> list[float]:
        """P(drafts 1..k are all kept), k = 1..K, over steps."""
        return [sum(count >= k for count in self.accepted) / max(1, self.steps) for k in range(1, self.num_drafts + 1)]

    @property
    def histogram(self) -> list[int]:
        """Steps by the tokens they gained, 0..1 + K (index 0 is always empty: the target's token comes for free)."""
        return [sum(1 + count == tokens for count in self.accepted) for tokens in range(self.num_drafts + 2)]

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens behind the first one, which comes with the prompt."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds else 0.0

    @property
    def seconds_per_call(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0


def verify(
    log_p: Tensor, log_q: Tensor, drafts: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Rejection sampling of drafts[B, K]; log_p: [B, K + 1, V] of the target, log_q: [B, K, V] they were drawn from.

    Returns how many drafts are accepted [B], and the token behind them [B]: recovered, or the bonus after K drafts.
    """
    if sampling.greedy:
        choice = log_p.argmax(-1)  # [B, K + 1]
        accepted = (choice[:, :-1] == drafts).long().cumprod(-1).sum(-1)
        return accepted, choice.gather(1, accepted[:, None])[:, 0]
    chosen = drafts[..., None]
    keep = (log_p[:, :-1].gather(-1, chosen) - log_q.gather(-1, chosen))[..., 0].exp()  # [B, K]
    uniform = torch.rand(keep.shape, generator=generator, device=keep.device)
    accepted = (uniform < keep).long().cumprod(-1).sum(-1)
    # Behind the last draft nothing was proposed: q = 0, and the "recovered" token is a draw from p.
    q = torch.cat([log_q.exp(), torch.zeros_like(log_p[:, :1])], 1)
    at = accepted[:, None, None].expand(-1, 1, log_p.shape[-1])
    left = (log_p.exp().gather(1, at) - q.gather(1, at))[:, 0].clamp(min=0)  # [B, V]
    # p = q up to rounding leaves nothing; the rejection was then rounding as well, and p itself is the law.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, log_p.exp().gather(1, at)[:, 0])
    return accepted, torch.multinomial(left, 1, generator=generator)[:, 0]


def draft(
    head: nn.Module,
    hidden: Tensor,
    first: Tensor,
    num_drafts: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Drafts [B, K] behind first[B] = x_1 at hidden[B, D], and the laws [B, K, V] (log) they were drawn from."""
    params, circuit = circuit_params(head, hidden, num_drafts + 1), head.circuit
    state, token = circuit.start(params), first
    laws, tokens = [], []
    for k in range(1, num_drafts + 1):
        state = circuit.observe(params, state, k - 1, token)
        laws.append(sampling.draft_log_probs(circuit.next_log_probs(params, state, k)))
        token = sampling.pick(laws[-1], generator)
        tokens.append(token)
    return torch.stack(tokens, 1), torch.stack(laws, 1)


@torch.inference_mode()
def decode(
    mode: str,
    reader: Reader,
    states: Tensor,
    head: nn.Module | None,
    new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    num_drafts: int | None = None,
    stops: set[int] = frozenset(),
    show: Callable[[Sequence[int]], object] | None = None,
) -> Decoded:
    """Continues one text by up to ``new_tokens`` tokens.

    ``reader`` has read the prompt, states[1, P, D] are what it returned; ``head`` may be None in mode stp. ``stops``:
    tokens that end the text. ``show`` is given the tokens as they come. Raises UsageError for an unknown mode.
    """
    if mode not in MODES:
        raise UsageError(f"mode {mode!r}: allowed are {', '.join(MODES)}")
    done = Decoded(num_drafts=0 if mode == "stp" else num_positions(head, num_drafts) - 1)
    started = time.perf_counter()
    hidden = states[:, -1]  # [1, D]: the last token that belongs to the text

    def emit(tokens: Sequence[int], hidden: Tensor) -> bool:
        """Adds tokens whose predicting states are hidden[len, D]; whether the text goes on."""
        room = new_tokens - len(done.tokens)
        stop = next((at + 1 for at, token in enumerate(tokens) if token in stops), len(tokens))
        kept = list(tokens[: min(room, stop)])
        log_p = reader.logits(hidden[: len(kept)]).log_softmax(-1)
        done.nats += (-log_p[range(len(kept)), kept]).tolist()
        done.tokens += kept
        if show:
            show(kept)
        return len(done.tokens) < new_tokens and not any(token in stops for token in kept)

    first = sampling.pick(sampling.log_probs(reader.logits(hidden)), generator)
    goes_on = emit(first.tolist(), hidden)
    while goes_on:
        if mode == "stp":
            drafts, log_q = first.new_empty(1, 0), None
        else:
            drafts, log_q = draft(head, hidden, first, done.num_drafts, sampling, generator)
        states = reader.read(torch.cat([first[:, None], drafts], 1))  # [1, 1 + K, D]
        log_p = sampling.log_probs(reader.logits(states))
        if mode == "speculative":
            count, first = verify(log_p, log_q, drafts, sampling, generator)
        else:
            count, first = torch.tensor([drafts.shape[1]]), sampling.pick(log_p[:, -1], generator)
        accepted = int(count)
        done.accepted.append(accepted)
        reader.crop(drafts.shape[1] - accepted)
        hidden = states[:, accepted]
        goes_on = emit([*drafts[0, :accepted].tolist(), int(first)], states[0])
    done.seconds = time.perf_counter() - started
    return done


def continue_prompt(
    mode: str,
    target: Target,
    prompt: Tensor,
    head: nn.Module | None,
    new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    num_drafts: int | None = None,
    stops: set[int] = frozenset(),
    show: Callable[[Sequence[int]], object] | None = None,
) -> Decoded:
    """``decode`` behind prompt[P] (at least one token) on a target, the reading of the prompt timed apart."""
    session = Session(target)
    started = time.perf_counter()
    states = session.start([prompt])
    seconds = time.perf_counter() - started
    done = decode(mode, session, states, head, new_tokens, sampling, generator, num_drafts, stops, show)
    done.prompt_seconds = seconds
    return done
