"""Expected tokens/step of a head under the serving rule, computed on the target's own text.

A step at position t knows h_t and the target's own token x_1; it drafts x_2..x_(1+K) from q(. | x_1.., h_t), and a
draft is accepted with probability min(1, p/q). The text that comes out is the target's whatever is drafted, so it can
be drawn first: given that the token at k came out as x_k, it was an accepted draft with probability
P(x_k drafted and accepted) / P(x_k comes out) = min(p, q) / p = min(1, q(x_k) / p(x_k)).
Averaged over text of the target this equals the average of min(1, p/q) over drafts, product by product: both are the
sum over paths of the product of min(p, q). No further target forward and no draft noise is needed. Greedy text:
a draft is accepted if the conditional argmax of q is the next greedy token.

``overlap``: the last factor of such a product, averaged over x_k ~ p, is sum_v min(p, q)(v) (Rao-Blackwell). With it
the expectation is the same and the noise less. Without it the metrics are the expectation *given* this very text,
which is what counters of a server that wrote this text are compared with.

Steps do not start everywhere equally often: an accepted draft is skipped over. ``tokens_per_step`` therefore follows
the steps through each continuation (exactly, by the probability that a step starts at each position) and is the
number of tokens by the number of steps, which is what a server counts. A server starts no step once a text has ended,
and counts the accepted drafts of the last step also where its tokens are cut: so do these metrics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.eval.metrics import Metrics, check_drafts, ratio
from vllm_mtpc.eval.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm_mtpc.circuits import CircuitParams
    from vllm_mtpc.eval.text import Samples
    from vllm_mtpc.hf import Target

BATCH_ELEMENTS = 2**26  # float32 values of the leaves of one batch: 256 MiB


@dataclass(frozen=True)
class Contexts:
    """What was computed at every position of some texts where a step may start; S texts, T positions, K drafts."""

    text: Tensor  # [S, T, K] P(drafts 1..k accepted | the text), 0 where no step can start
    overlap: Tensor  # [S, T, K] the same with the last factor averaged over the target's distribution
    valid: Tensor  # [S, T] bool
    target_nats: Tensor  # [S, T] -log p(x_1), temperature 1
    joint_nats: Tensor  # [S, T] -log q(x_1..x_(1+K)), temperature 1
    bytes_per_token: float | None = None


def circuit_params(head: nn.Module, hidden: Tensor, num_positions: int | None = None) -> CircuitParams:
    """Parameters of the circuits at hidden[B, D], read in the head's own dtype as in serving."""
    return head(hidden.to(next(head.parameters()).dtype), num_positions)


def num_positions(head: nn.Module, num_drafts: int | None) -> int:
    """m = 1 + K positions a step looks at. Raises UsageError where the window has no K drafts."""
    return head.circuit.window if num_drafts is None else check_drafts(head.circuit.window, num_drafts) + 1


def _factors(log_q: Tensor, log_p: Tensor | None, tokens: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Acceptance [B, K] of the text's tokens[B, K], and its average over the target's; log_q: [B, K, V]."""
    if log_p is None:
        hit = (log_q.argmax(-1) == tokens).float()
        return hit, hit
    log_q, chosen = sampling.draft_log_probs(log_q), tokens[..., None]
    text = (log_q.gather(-1, chosen) - log_p.gather(-1, chosen))[..., 0].clamp(max=0).exp()
    return text, torch.minimum(log_p, log_q).exp().sum(-1).clamp(max=1)


def exact_counts(alive: Tensor) -> Tensor:
    """P(exactly k drafts are accepted) [S, T, K + 1], k = 0..K; alive[S, T, K]: P(the first k are)."""
    at_least = torch.nn.functional.pad(torch.nn.functional.pad(alive, (1, 0), value=1.0), (0, 1))
    return at_least[..., :-1] - at_least[..., 1:]


def step_starts(alive: Tensor) -> Tensor:
    """Probability that a step starts at each position, the first one certain.

    alive[S, T, K] = P(the first k drafts of a step at t are accepted). Returns [S, T].
    """
    sequences, length, drafts = alive.shape
    exactly = exact_counts(alive)  # the step advances by 1 + k
    starts = alive.new_zeros(sequences, length + drafts + 1)
    starts[:, 0] = 1
    for t in range(length):
        starts[:, t + 1 : t + drafts + 2] += starts[:, t : t + 1] * exactly[:, t]
    return starts[:, :length]


@torch.inference_mode()
def collect(
    head: nn.Module,
    target: Target,
    samples: Samples,
    sampling: Sampling,
    num_drafts: int | None = None,
    batch: int | None = None,
) -> Contexts:
    """Acceptance at every position where a server may start a step (``Samples.starts``)."""
    m = num_positions(head, num_drafts)
    first, count = samples.starts(m - 1)
    valid = torch.arange(int(count.max())) < count[:, None]  # [S, T]
    rows, columns = valid.nonzero(as_tuple=True)
    batch = batch or max(1, min(1024, BATCH_ELEMENTS // (m * head.circuit.num_components * target.vocab_size)))
    pieces = []
    for row, position in zip(rows.split(batch), (first[rows] + columns).split(batch), strict=True):
        at = position[:, None] + torch.arange(m)
        tokens, states = samples.tokens[row[:, None], at + 1].to(target.device), samples.hidden[row[:, None], at]
        read = samples.read[row, position].to(target.device)
        log_q = conditionals(head.circuit, circuit_params(head, read, m), tokens)
        pieces.append(_at_contexts(log_q, target, states.to(target.device), tokens, sampling).cpu())
    values = torch.cat(pieces)  # [contexts, 2 K + 2]

    def spread(part: Tensor) -> Tensor:
        filled = torch.zeros(*valid.shape, *part.shape[1:], dtype=torch.float64)
        filled[rows, columns] = part.double()
        return filled

    text, overlap = spread(values[:, : m - 1]), spread(values[:, m - 1 : -2])
    return Contexts(text, overlap, valid, spread(values[:, -2]), spread(values[:, -1]), samples.bytes_per_token)


def _at_contexts(log_q: Tensor, target: Target, states: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Columns: K products along the text, K with the last factor averaged, nats of x_1, nats of x_1..x_m."""
    log_p = None if sampling.greedy else sampling.log_probs(target.logits(states[:, 1:]))
    factor, average = _factors(log_q[:, 1:], log_p, tokens[:, 1:], sampling)
    text = factor.cumprod(-1)
    before = torch.cat([torch.ones_like(text[:, :1]), text[:, :-1]], -1)
    nats = -target.logits(states[:, 0]).log_softmax(-1).gather(-1, tokens[:, :1])
    joint = -log_q.gather(-1, tokens[..., None]).sum((1, 2))[:, None]
    return torch.cat([text, before * average, nats, joint], -1)


def summarise(contexts: Contexts, overlap: bool = True) -> Metrics:
    """Metrics of all texts together; ``overlap=False``: given the very texts, as a server that wrote them counts."""
    alive, valid = contexts.overlap if overlap else contexts.text, contexts.valid
    starts = step_starts(contexts.text) * valid
    steps = starts.sum(1)  # [S]
    drafts, contexts_count = alive.shape[-1], int(valid.sum())
    # The tokens of the counted steps, also where the last one passes the end: no edge effect.
    value, error = ratio((starts * (1 + alive.sum(-1))).sum(1), steps)
    nats_to_bits = 1 / (math.log(2) * contexts_count)
    return Metrics(
        tokens_per_step=value,
        standard_error=error,
        per_position=((starts[..., None] * alive).sum((0, 1)) / steps.sum()).tolist(),
        anywhere=1 + alive.sum().item() / contexts_count,
        sequences=len(valid),
        contexts=contexts_count,
        steps=steps.sum().item(),
        target_bits=contexts.target_nats.sum().item() * nats_to_bits,
        joint_bits=contexts.joint_nats.sum().item() * nats_to_bits / (1 + drafts),
        bytes_per_token=contexts.bytes_per_token,
    )


def measure(
    head: nn.Module,
    target: Target,
    samples: Samples,
    greedy: bool,
    temperature: float = 1.0,
    num_drafts: int | None = None,
) -> Metrics:
    """Metrics of ``head`` on texts of ``target`` that were drawn with the same sampling (``greedy``: argmax)."""
    sampling = Sampling(0.0 if greedy else temperature)
    return summarise(collect(head, target, samples, sampling, num_drafts))
