"""The evaluator's shortcut (acceptance read off the target's own text) against enumeration of the serving rule."""

import itertools

import pytest
import torch

from vllm_mtpc.config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.train import evaluate
from vllm_mtpc.train.heads import conditionals
from vllm_mtpc.train.samples import Samples

V, N, D = 4, 4, 6


def tiny_head(circuit: str) -> torch.nn.Module:
    torch.manual_seed(5)
    sizes = {"model_type": "llama", "vocab_size": V, "hidden_size": D}
    config = HeadConfig.create(
        circuit=circuit, window=N, num_components=1 if circuit == "ff" else 3, target=sizes, verifier="../target"
    )
    head = build_head(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head.requires_grad_(False)


class TinyTarget:
    """A target whose hidden state is a fixed random function of the last two tokens read."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn(V, V, D, generator=generator)
        self.lm_head = torch.randn(V, D, generator=generator)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, L] -> [B, L - 1, D]: the state after each token but the first."""
        return self.table[tokens[:, :-1], tokens[:, 1:]]


def all_windows() -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(V), repeat=N)))


@pytest.mark.parametrize("circuit", ["ff", "cp", "hmm", "btree"])
def test_conditionals_agree_with_the_circuit(circuit):
    head, tokens = tiny_head(circuit), all_windows()
    params = head(torch.randn(1, D).expand(len(tokens), D))
    log_q = conditionals(head.circuit, params, tokens)
    along = log_q.gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(along, head.circuit.conditional_log_probs(params, tokens), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(len(tokens), N))


@pytest.mark.parametrize("circuit", ["ff", "cp", "hmm", "btree"])
def test_sampled_acceptance_is_that_of_drafted_paths(circuit):
    """sum over text of p * prod min(1, q/p) = sum over drafts of p(x_1) q * prod min(1, p/q), length by length."""
    head, target, tokens = tiny_head(circuit), TinyTarget(), all_windows()
    prompt = torch.tensor([1, 2]).expand(len(tokens), 2)
    states = target.hidden(torch.cat([prompt, tokens], 1))[:, :N]
    p = (states @ target.lm_head.T).softmax(-1).gather(-1, tokens[..., None])[..., 0]
    q = conditionals(head.circuit, head(states[:, 0]), tokens).exp().gather(-1, tokens[..., None])[..., 0]
    drafted = p[:, 0] * q[:, 1:].prod(1)
    by_drafts = (drafted[:, None] * (p / q)[:, 1:].clamp(max=1).cumprod(1)).sum(0)
    shortcut = evaluate.acceptance(head, target.lm_head, states, tokens, greedy=False).cumprod(1)
    by_text = (p.prod(1)[:, None] * shortcut).sum(0)
    torch.testing.assert_close(by_text, by_drafts, atol=1e-5, rtol=1e-5)


def test_greedy_acceptance_is_that_of_the_drafts():
    head, target = tiny_head("btree"), TinyTarget()
    text = [0, 1]
    for _ in range(N):
        state = target.hidden(torch.tensor([text[-2:]]))[:, 0]
        text.append(int((state @ target.lm_head.T).argmax()))
    tokens = torch.tensor([text[2:]])
    states = target.hidden(torch.tensor([text]))[:, :N]
    drafts = head.circuit.greedy(head(states[:, 0]), prefix=tokens[:, :1])
    expected = (drafts == tokens)[:, 1:].float().cumprod(1)
    measured = evaluate.acceptance(head, target.lm_head, states, tokens, greedy=True).cumprod(1)
    assert torch.equal(measured, expected)


def test_step_starts_follow_the_jumps():
    """Against all jump sequences of a short text, enumerated."""
    torch.manual_seed(0)
    alive = torch.rand(1, 5, 2).cumprod(-1)
    exactly = torch.cat([1 - alive[..., :1], alive[..., :1] - alive[..., 1:], alive[..., 1:]], -1)[0]
    expected = torch.zeros(5)

    def walk(position: int, probability: float) -> None:
        if position < 5:
            expected[position] += probability
            for accepted in range(3):
                walk(position + 1 + accepted, probability * exactly[position, accepted].item())

    walk(0, 1.0)
    torch.testing.assert_close(evaluate.step_starts(alive)[0], expected)


@pytest.mark.parametrize("greedy", [False, True])
def test_measure_agrees_with_a_simulated_server(greedy):
    """Drafts, accepts and rejects token by token; the tokens per step must agree within the noise."""
    torch.manual_seed(1)
    head, target = tiny_head("hmm"), TinyTarget()
    rows, length = (40 if greedy else 400), 42

    def law(text: list[int]) -> torch.Tensor:
        return (target.lm_head @ target.table[text[-2], text[-1]]).softmax(-1)

    def pick(probabilities: torch.Tensor) -> int:
        return int(probabilities.argmax() if greedy else torch.multinomial(probabilities, 1))

    text = torch.randint(0, V, (rows, 2))
    for _ in range(length):
        p = (target.hidden(text[:, -2:])[:, 0] @ target.lm_head.T).softmax(-1)
        text = torch.cat([text, p.argmax(-1, keepdim=True) if greedy else torch.multinomial(p, 1)], 1)
    # The state before the first pair does not exist; it belongs to the prompt and is not read.
    hidden = torch.cat([torch.zeros(rows, 1, D), target.hidden(text)], 1)[:, :-1]
    figures = evaluate.measure(head, target.lm_head, Samples(text, hidden, prompt=2), greedy)
    tokens = steps = 0
    for row in range(rows if greedy else 120):
        served = text[row, :2].tolist()
        first = pick(law(served))
        while len(served) <= length - N + 2:  # as far as the evaluator's windows reach
            state = target.table[served[-2], served[-1]][None]
            window, params = [first], head(state)
            circuit_state = head.circuit.observe(params, head.circuit.start(params), 0, torch.tensor([first]))
            context = [*served, first]
            for k in range(1, N):
                q = head.circuit.next_log_probs(params, circuit_state, k)[0].exp()
                p, draft = law(context), pick(q)
                accepted = draft == int(p.argmax()) if greedy else torch.rand(()) < p[draft] / q[draft]
                if not accepted:
                    first = pick(p if greedy else (p - q).clamp(min=0))
                    break
                window.append(draft)
                context.append(draft)
                circuit_state = head.circuit.observe(params, circuit_state, k, torch.tensor([draft]))
            else:
                first = pick(law(context))
            served += window
            tokens, steps = tokens + len(window), steps + 1
    assert figures.tokens_per_step == pytest.approx(tokens / steps, rel=1e-5 if greedy else 0.04)
    assert figures.tokens_per_step == pytest.approx(1 + sum(figures.per_position), abs=1e-6)


def test_standard_error_of_a_ratio():
    value, error = evaluate.ratio(torch.tensor([2.0, 2.0, 2.0]), torch.tensor([1.0, 1.0, 1.0]))
    assert (value, error) == (2.0, 0.0)
