"""The evaluator's shortcut (acceptance read off the target's own text) against enumeration of the serving rule."""

import itertools

import pytest
import torch

from tests.support.tiny import N, TableTarget, V, acceptance, at_contexts, tiny_head
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval import circuit_evaluator as evaluate
from vllm_mtpc.eval.circuit_evaluator import along_text
from vllm_mtpc.eval.text import Samples, Sampling

CIRCUITS = ["ff", "cp", "hmm", "btree"]


def enumerated(target: TableTarget, head, m: int, temperature: float = 1.0):
    """All windows after one prompt: tokens [W, m], states [W, m, D], p and q [W, m, V] at a temperature."""
    tokens = torch.tensor(list(itertools.product(range(V), repeat=m)))
    prompt = torch.tensor([1, 2]).expand(len(tokens), 2)
    states = target.states(torch.cat([prompt, tokens], 1))[:, :m]
    p = (target.logits(states) / temperature).softmax(-1)
    log_q = along_text(head, states[:, 0], tokens)
    q = torch.zeros(len(tokens), m - 1, V)
    q[..., slice(None) if head.vocabulary is None else head.vocabulary.ids] = (log_q / temperature).softmax(-1)
    return tokens, states, p, q


def along(distribution: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return distribution.gather(-1, tokens[..., None])[..., 0]


@pytest.mark.parametrize("circuit", CIRCUITS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("columns", [None, 3])
def test_sampled_acceptance_is_that_of_drafted_paths(circuit, temperature, columns):
    """sum over text of p * prod min(1, q/p) = sum over drafts of p(x_1) q * prod min(1, p/q), length by length."""
    head, target = tiny_head(circuit, draft_vocab_size=columns), TableTarget()
    if columns:
        head.set_vocabulary(torch.tensor([0, 1, 3]))
    tokens, states, p, q = enumerated(target, head, N, temperature)
    p, q = along(p, tokens), along(q, tokens[:, 1:])
    drafted = p[:, 0] * q.prod(1)
    by_drafts = (drafted[:, None] * (p[:, 1:] / q).clamp(max=1).cumprod(1)).sum(0)
    shortcut = acceptance(head, target, states, tokens, Sampling(temperature))
    by_text = (p.prod(1)[:, None] * shortcut).sum(0)
    torch.testing.assert_close(by_text, by_drafts, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("circuit", CIRCUITS)
@pytest.mark.parametrize("drafts", [N - 1, 1])
def test_overlaps_have_the_same_expectation_and_less_noise(circuit, drafts):
    """Both estimators averaged over every text with its exact probability; the injected one has the wrong mean."""
    head, target = tiny_head(circuit), TableTarget()
    tokens, states, p, _ = enumerated(target, head, drafts + 1)
    weight = along(p, tokens).prod(1).double()
    log_q = along_text(head, states[:, 0], tokens)
    values = at_contexts(log_q, target, states, tokens, Sampling(1.0), None)
    text, overlap = (part.double() for part in values[:2])
    means = [(weight[:, None] * part).sum(0) for part in (text, overlap)]
    torch.testing.assert_close(*means, atol=1e-6, rtol=1e-5)
    spreads = [
        (weight * (part.sum(1) - mean.sum()) ** 2).sum() for part, mean in zip((text, overlap), means, strict=True)
    ]
    assert spreads[1] < spreads[0]
    injected = text * overlap.clamp(max=1)  # the overlap on top of the last factor instead of in its place
    assert ((weight[:, None] * injected).sum(0) - means[0]).abs().max() > 1e-3


def test_bits_are_those_of_the_distributions():
    head, target = tiny_head("hmm"), TableTarget()
    tokens, states, p, q = enumerated(target, head, N)
    values = at_contexts(q.log(), target, states, tokens, Sampling(0.5), None)
    first = along(p, tokens)[:, 0].log()
    torch.testing.assert_close(values[2], -first, atol=1e-5, rtol=1e-5)
    joint = first + head.circuit.conditional_log_probs(head(states[:, 0]), tokens)[:, 1:].sum(1)
    torch.testing.assert_close(values[3], -joint, atol=1e-4, rtol=1e-5)
    assert joint.exp().sum().item() == pytest.approx(1.0, abs=1e-4)  # all windows share one h_t


def test_an_ended_text_starts_no_step(monkeypatch):
    """Contexts: positions from the prompt's end on, up to the one whose x_1 stands before the last token."""
    head, target = tiny_head("cp"), TableTarget()
    whole = target.write(rows=2, length=20, greedy=False)
    tokens = whole.tokens.clone()
    tokens[1, 2 + 6 + N - 1 :] = -1  # the second text ends after 6 new tokens; N - 1 later tokens are known
    samples = Samples(tokens, whole.hidden, whole.prompt_lengths, torch.tensor([2 + 20 - N + 1, 2 + 6]))
    contexts = evaluate.collect(head, target, samples, Sampling(1.0))
    assert contexts.valid.sum(1).tolist() == [20 - N, 5]
    short = Samples(tokens[:, :8], whole.hidden[:, :7], whole.prompt_lengths, torch.tensor([8, 8]))  # ends there
    assert evaluate.collect(head, target, short, Sampling(1.0)).valid.sum(1).tolist() == [6 - N + 1] * 2
    with pytest.raises(UsageError, match="raise the number of new tokens"):
        evaluate.collect(head, target, target.write(rows=2, length=N - 1, greedy=False), Sampling(1.0))
    monkeypatch.setattr(evaluate, "BATCH_ELEMENTS", 150)  # three contexts
    other = evaluate.collect(head, target, samples, Sampling(1.0))
    torch.testing.assert_close(contexts.text, other.text, atol=1e-6, rtol=1e-5)  # sums in another order
