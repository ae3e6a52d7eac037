"""Expected tokens/step of circuits, computed on the target's own text.

A step at position t is conditioned on h_t and the target's token x_1; it drafts x_2..x_(1+K) from q(. | x_1.., h_t). A
draft is accepted with probability min(1, p/q) (Leviathan et al., 2023). The output has the target's distribution for
any drafts, so the text can be drawn first: given that the token at k is x_k, it was an accepted draft with probability
P(x_k drafted and accepted) / P(x_k) = min(p, q) / p = min(1, q(x_k) / p(x_k)).
Averaged over text of the target this equals the average of min(1, p/q) over drafts, product by product: both are the
sum over paths of the product of min(p, q). No further target forward and no draft noise is needed. Greedy text:
a draft is accepted if the conditional argmax of q is the next greedy token.

``overlap``: the last factor of such a product, averaged over x_k ~ p, is sum_v min(p, q)(v) (Rao-Blackwell). With it
the expectation is the same and the noise less. Without it the metrics are the expectation *given* this text, which
is compared with the counters of a server that wrote it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_mtpc.circuits.base import DraftVocabulary
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.eval.metrics import StepMetrics, check_drafts, step_starts
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.heads.head import Head
from vllm_mtpc.hf import Target

BATCH_ELEMENTS = 2**26  # float32 values of the leaves of one batch: 256 MiB
TEXTS = 8  # whose context is in memory at the same time


@dataclass(frozen=True, kw_only=True)
class Metrics(StepMetrics):
    """Metrics of a circuit head."""

    anywhere: float  # expected tokens of a step started at a uniformly chosen position
    contexts: int
    target_bits: float  # per token of the text, under the target at temperature 1
    joint_bits: float | None  # per token, under the circuit's joint over the window; None: with a draft vocabulary
    coverage: float  # share of the drafted positions' tokens that have a column
    bytes_per_token: float | None  # of the text; None where its tokenizer is not known


@dataclass(frozen=True)
class Contexts:
    """Values at every position of S texts where a step may start; T positions, K drafts."""

    text: Tensor  # [S, T, K] P(drafts 1..k accepted | the text), 0 where no step can start
    overlap: Tensor  # [S, T, K] the same with the last factor averaged over the target's distribution
    target_nats: Tensor  # [S, T] -log p(x_1), temperature 1
    joint_nats: Tensor  # [S, T] -log q(x_1..x_(1+K)), temperature 1; x_1 by the target where the trunk has seen it
    covered: Tensor  # [S, T] 1 where x_2 has a column
    valid: Tensor  # [S, T] bool
    bytes_per_token: float | None = None


def along_text(head: Head, read: Tensor, tokens: Tensor) -> Tensor:
    """Return log q [B, m - 1, columns] of drafts along tokens [B, m]; `read`: `hidden` of `Trunk.forward`."""
    params = head(read.to(head.hidden_dtype), tokens[:, 0], tokens.shape[1])  # in the head's dtype, as in serving
    log_q = conditionals(head.circuit, params, tokens)
    return log_q[:, 1 - params.skip :]


@torch.inference_mode()
def collect(
    head: Head, target: Target, samples: Samples, sampling: Sampling, num_drafts: int | None = None
) -> Contexts:
    """Compute the acceptance at every position where a server may start a step (``Samples.starts``)."""
    m = 1 + check_drafts(head.circuit.window, num_drafts, head.circuit.window - 1)  # positions a step looks at
    first, count = samples.starts(m - 1)
    valid = torch.arange(int(count.max())) < count[:, None]  # [S, T]
    rows, columns = valid.nonzero(as_tuple=True)
    batch = max(1, min(1024, BATCH_ELEMENTS // (m * head.circuit.num_components * target.vocab_size)))
    positions, pieces = first[rows] + columns, []
    for begin in range(0, len(samples.tokens), TEXTS):
        row, position = (part[(rows >= begin) & (rows < begin + TEXTS)] for part in (rows, positions))
        read = samples.read[begin : begin + TEXTS]
        document, x_1 = torch.zeros(read.shape[:2], dtype=torch.long), samples.tokens[row, position + 1]
        given = (part.to(target.device) for part in (read, document, row - begin, position, x_1))
        windows = head.trunk.windows(*given)
        for some in (slice(start, start + batch) for start in range(0, len(row), batch)):
            at = position[some, None] + torch.arange(m)
            tokens = samples.tokens[row[some, None], at + 1].to(target.device)
            # windows overlap: the target's logits are computed once per position
            places, index = (row[some, None] * samples.hidden.shape[1] + at).unique(return_inverse=True)
            logits = target.logits(samples.hidden.flatten(0, 1)[places].to(target.device))
            log_q = along_text(head, windows(some).to(samples.hidden.dtype), tokens)
            pieces.append(_at_contexts(log_q, logits, index, tokens, sampling, head.vocabulary))

    def spread(part: Tensor) -> Tensor:
        filled = torch.zeros(*valid.shape, *part.shape[1:], dtype=torch.float64)
        filled[rows, columns] = part.double()
        return filled

    text, overlap, nats, joint, covered = (spread(torch.cat(parts)) for parts in zip(*pieces, strict=True))
    return Contexts(text, overlap, nats, joint, covered, valid, samples.bytes_per_token)


def _at_contexts(
    log_q: Tensor,
    logits: Tensor,
    index: Tensor,
    tokens: Tensor,
    sampling: Sampling,
    vocabulary: DraftVocabulary | None,
) -> tuple[Tensor, ...]:
    """Return the first five fields of `Contexts` for B contexts, on the host.

    Args:
        log_q: [B, K, columns], of a head along tokens.
        logits: [U, V], of the target.
        index: [B, m], rows of `logits` that predict tokens.
        tokens: [B, m].
        sampling: of the target.
        vocabulary: of the columns.
    """
    nats = -logits.log_softmax(-1)[index[:, 0]].gather(-1, tokens[:, :1])[:, 0]
    drafts = tokens[:, 1:]
    columns = drafts if vocabulary is None else vocabulary.find(drafts)
    chosen, is_inside = columns.clamp(min=0)[..., None], columns >= 0
    joint = nats - (log_q.gather(-1, chosen)[..., 0] * is_inside).sum(1)
    if sampling.greedy:
        factor = average = ((log_q.argmax(-1) == columns) & is_inside).float()  # [B, K]
    else:
        log_p, log_q = sampling.log_probs(logits), sampling.draft_log_probs(log_q)
        log_p = (log_p if vocabulary is None else log_p[:, vocabulary.ids])[index[:, 1:]]
        factor = (log_q.gather(-1, chosen) - log_p.gather(-1, chosen))[..., 0].clamp(max=0).exp() * is_inside
        average = torch.minimum(log_p, log_q).exp().sum(-1).clamp(max=1)
    text = factor.cumprod(-1)
    before = torch.cat([torch.ones_like(text[:, :1]), text[:, :-1]], -1)
    return tuple(part.cpu() for part in (text, before * average, nats, joint, is_inside[:, 0]))


def summarise(contexts: Contexts, overlap: bool = True) -> Metrics:
    """Return the metrics of all texts; ``overlap=False``: given the texts, as a server that wrote them counts."""
    alive, count = contexts.overlap if overlap else contexts.text, int(contexts.valid.sum())
    coverage = contexts.covered.sum().item() / count
    nats_to_bits = 1 / (math.log(2) * count)
    return Metrics.of(
        step_starts(contexts.text, contexts.valid),
        alive,
        anywhere=1 + alive.sum().item() / count,
        contexts=count,
        target_bits=contexts.target_nats.sum().item() * nats_to_bits,
        joint_bits=None if coverage < 1 else contexts.joint_nats.sum().item() * nats_to_bits / (1 + alive.shape[-1]),
        coverage=coverage,
        bytes_per_token=contexts.bytes_per_token,
    )
