"""The evaluator of circuit heads: expected tokens/step, computed on the target's own text.

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
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.load import load_head, read_adapters
from vllm_mtpc.circuits.base import DraftVocabulary
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.evaluator import (
    Evaluator,
    Requests,
    StepMetrics,
    check_drafts,
    exact_counts,
    shown_shares,
    step_starts,
)
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.heads.head import Head
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import Target, bind

BATCH_ELEMENTS = 2**26  # float32 values of the leaves of one batch: 256 MiB
TEXTS = 8  # whose context is in memory at the same time


@dataclass(frozen=True, kw_only=True)
class Metrics(StepMetrics):
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
        read = (samples.hidden if samples.draft is None else samples.draft)[begin : begin + TEXTS]
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
    log_q: Tensor, logits: Tensor, index: Tensor, tokens: Tensor, sampling: Sampling, vocabulary: DraftVocabulary | None
) -> tuple[Tensor, ...]:
    """Return the first five fields of `Contexts` for B contexts, on the host.

    log_q [B, K, columns]: of a head along tokens [B, m]; logits[index], [B, m, V]: the target's, which predict them.
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


@dataclass(frozen=True)
class Evaluation:
    temperature: float
    expected: Metrics  # last factor of each product averaged over the target's distribution
    along_text: Metrics  # the expectation given these texts

    @property
    def figures(self) -> Metrics:
        return self.expected


@dataclass(frozen=True)
class MtpcEvaluator(Evaluator):
    """A circuit head in float32 on its target's device."""

    folder: Path
    config: HeadConfig
    head: Head
    target: Target
    draft_layers: LoraDraftLayers | None = None

    @classmethod
    def attach(cls, folder: Path, target: Target) -> MtpcEvaluator:
        config, head = load_head(folder, device=target.device)
        bind(head, target)
        layers = LoraDraftLayers.load(read_adapters(folder, config), target) if config.lora_layers else None
        return cls(folder, config, head, target, layers)

    @staticmethod
    def serving(args: Namespace, config: HeadConfig, num_drafts: int, max_num_seqs: int) -> dict[str, Any]:
        if args.draft_pass:
            raise UsageError("--draft-pass: circuits draft without a pass; leave it out, or name a PTP head")
        return {}

    def sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        return Sampling(temperature, top_p, self.config.draft_sample_method == "greedy", top_k)

    def evaluate(self, samples: Samples, sampling: Sampling, num_drafts: int, seed: int) -> Evaluation:
        contexts = collect(self.head, self.target, self._read(samples), sampling, num_drafts)
        return Evaluation(sampling.temperature, summarise(contexts), summarise(contexts, overlap=False))

    def title(self, num_drafts: int) -> str:
        config = self.config
        parts = f"{config.trunk.kind} x {config.leaves.kind} x {config.circuit.kind}"
        return f"{self.folder}: {parts}, n={config.window}, r={config.num_components}, K={num_drafts} drafts"

    def rows(self, result: Evaluation) -> dict[str, str]:
        expected = result.expected
        return {
            "tokens/step, expected ± s.e.": expected.shown,
            "  given these texts": result.along_text.shown,
            "  from any position": f"{expected.anywhere:.3f}",
            "acceptance per position": shown_shares(expected.per_position),
            "bits per token, target": f"{expected.target_bits:.3f}",
            "bits per token, circuit's joint": "-" if expected.joint_bits is None else f"{expected.joint_bits:.3f}",
            "tokens in the draft vocabulary": f"{expected.coverage:.2%}",
            "texts, contexts": f"{expected.sequences}, {expected.contexts:,}",
        }

    def predict(
        self, samples: Samples, sampling: Sampling, requests: Requests, u: Tensor | None
    ) -> tuple[Metrics, float]:
        contexts = collect(self.head, self.target, self._read(samples), sampling, requests.num_drafts)
        return summarise(contexts, overlap=False), noise_given_text(contexts)

    @torch.inference_mode()
    def _read(self, samples: Samples) -> Samples:
        """Add the states that the trunk reads, if they are not the target's last ones."""
        layers, own = self.head.trunk.aux_layers, self.draft_layers
        if not layers and own is None:
            return samples
        read = []
        for tokens in samples.tokens.clamp(min=0).split(self.target.rows_at_once):
            states = own.draft(own.trunk(tokens)) if own else self.target.hidden_with(layers, tokens)
            read.append(states[:, :-1].to(samples.hidden.dtype).cpu())
        return replace(samples, draft=torch.cat(read))


def noise_given_text(contexts: Contexts) -> float:
    """Return the standard error of the tokens/step that a server counts, given the text: only its steps are random.

    Exact, by the first two moments of the sum over steps of (accepted - mean accepted). 0 for greedy text.
    """
    alive, valid = contexts.text, contexts.valid
    starts, (sequences, length, drafts) = step_starts(alive, valid), alive.shape
    mean = ((starts[..., None] * alive).sum() / starts.sum()).item()
    exactly = exact_counts(alive) * valid[..., None]  # [S, T, K + 1]
    gain = torch.arange(drafts + 1, dtype=alive.dtype) - mean
    first, second = alive.new_zeros(2, sequences, length + drafts + 1)  # moments of the sum from a step at t on
    for t in reversed(range(length)):
        ahead = slice(t + 1, t + drafts + 2)
        first[:, t] = (exactly[:, t] * (gain + first[:, ahead])).sum(1)
        second[:, t] = (exactly[:, t] * (gain**2 + 2 * gain * first[:, ahead] + second[:, ahead])).sum(1)
    return math.sqrt(max(0.0, (second - first**2)[:, 0].sum().item())) / starts.sum().item()
