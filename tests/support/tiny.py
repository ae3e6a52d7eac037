"""Targets and heads whose distributions can be enumerated, and the decoding loop of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.eval.circuit_evaluator import _at_contexts, along_text
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.heads.head import build_head
from vllm_mtpc.hf import Session, Target

V, N, D = 4, 4, 6


def tiny_head(circuit: str, window: int = N, seed: int = 5, hidden_size: int = D, vocab_size: int = V, **options):
    """A head of random weights, large enough that its conditionals depend on what was seen."""
    torch.manual_seed(seed)
    sizes = {"model_type": "llama", "vocab_size": vocab_size, "hidden_size": hidden_size}
    given = {"circuit": circuit, "window": window, "num_components": 1 if circuit == "ff" else 3}
    config = HeadConfig.create(**given, target=sizes, verifier="../target", **options)
    head = build_head(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head.eval().requires_grad_(False)


def acceptance(head, target, states: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """P(drafts 2..k are accepted | text), k = 2..m, [B, m - 1]; states[:, k] predicts tokens[B, m][:, k]."""
    log_q = along_text(head, states[:, 0], tokens)
    return at_contexts(log_q, target, states, tokens, sampling, head.vocabulary)[0]


def at_contexts(log_q: torch.Tensor, target, states: torch.Tensor, tokens: torch.Tensor, *args):
    """The evaluator's values of windows whose states [B, m, D] predict tokens [B, m]."""
    return _at_contexts(
        log_q, target.logits(states.flatten(0, 1)), torch.arange(tokens.numel()).view_as(tokens), tokens, *args
    )


class TableTarget:
    """A target whose hidden state is a fixed random function of the last two tokens read."""

    device = torch.device("cpu")
    vocab_size = V

    def __init__(self, seed: int = 7):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(V, V, D, generator=generator)
        self.lm_head = torch.randn(V, D, generator=generator)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.lm_head.T

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, L] -> [B, L - 1, D]: the state after each token but the first."""
        return self.table[tokens[:, :-1], tokens[:, 1:]]

    def write(self, rows: int, length: int, greedy: bool, seed: int = 1) -> Samples:
        """Texts of ``length`` tokens after random prompts of two."""
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(0, V, (rows, 2), generator=generator)
        for _ in range(length):
            p = self.logits(self.states(text[:, -2:])[:, 0]).softmax(-1)
            new = p.argmax(-1, keepdim=True) if greedy else torch.multinomial(p, 1, generator=generator)
            text = torch.cat([text, new], 1)
        # The state before the first pair does not exist; it belongs to the prompt and is not read.
        hidden = torch.cat([torch.zeros(rows, 1, D), self.states(text)], 1)[:, :-1]
        return Samples(text, hidden, torch.full((rows,), 2), torch.full((rows,), 2 + length))


def llama_target(vocab_size: int = 32, seed: int = 3, eos: int | None = None) -> Target:
    """A random two-layer Llama in float32 without a tokenizer."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, initializer_range=0.3, bos_token_id=None, eos_token_id=eos)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return Target("tiny", model, None, model.base_model, model.get_output_embeddings(), "torch")


@dataclass
class Decoded:
    """A continuation, and the number of accepted drafts of each step."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Rejection:
    """Drafting and rejection sampling (Leviathan et al., 2023) of a circuit head."""

    def __init__(self, head, sampling: Sampling, generator=None, num_drafts: int | None = None):
        self.head, self.sampling, self.generator = head, sampling, generator
        self.num_drafts = num_drafts or head.circuit.window - 1

    def draft(self, hidden: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts [K] after x_1 = first[1] at hidden[1, D], and their log-distributions [K, V]."""
        circuit = self.head.circuit
        params = self.head(hidden.to(next(self.head.parameters()).dtype), self.num_drafts + 1)
        state, tokens, log_q = circuit.start(params), [first], []
        for k in range(1, self.num_drafts + 1):
            state = circuit.observe(params, state, k - 1, tokens[-1])
            log_q.append(self.sampling.draft_log_probs(circuit.next_log_probs(params, state, k)))
            tokens.append(self.sampling.pick(log_q[-1], self.generator))
        return torch.cat(tokens[1:]), torch.cat(log_q)

    def verify(self, log_p: torch.Tensor, log_q: torch.Tensor, drafts: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Accepted drafts[K] and the token after them [1], by log_p[K + 1, V] and log_q[K, V]."""
        choice = log_p.argmax(-1)
        for k, token in enumerate(drafts.tolist()):
            if self.sampling.greedy and token != choice[k]:
                return k, choice[k : k + 1]
            p, q = log_p[k].exp(), log_q[k].exp()
            if not self.sampling.greedy and torch.rand((), generator=self.generator) * q[token] >= p[token]:
                left = (p - q).clamp(min=0)
                return k, torch.multinomial(left if left.any() else p, 1, generator=self.generator)
        return len(drafts), self.sampling.pick(log_p[-1:], self.generator)


def decode(target: Target, prompt: torch.Tensor, drafting: Rejection, new_tokens: int) -> Decoded:
    """Continue prompt[P] as a server with drafts does; a step is a forward pass of the target after the prompt's."""
    session, sampling = Session(target), drafting.sampling
    hidden = session.start([prompt])[:, -1]
    first = sampling.pick(sampling.log_probs(session.logits(hidden)), drafting.generator)
    text = Decoded(first.tolist())
    while len(text.tokens) < new_tokens and not target.stop_ids & set(text.tokens):
        drafts, log_q = drafting.draft(hidden, first)
        states = session.read(torch.cat([first, drafts])[None])[0]  # [1 + K, D]
        accepted, first = drafting.verify(sampling.log_probs(session.logits(states)), log_q, drafts)
        if forget := len(drafts) - accepted:
            session.cache.crop(-forget)
        hidden = states[accepted : accepted + 1]
        text.accepted.append(accepted)
        text.tokens += [*drafts[:accepted].tolist(), int(first)]
    ends = [at + 1 for at, token in enumerate(text.tokens) if token in target.stop_ids]
    text.tokens = text.tokens[: min([new_tokens, *ends])]
    return text


def continue_all(target: Target, prompts, drafting, new_tokens: int) -> list[Decoded]:
    return [decode(target, prompt, drafting, new_tokens) for prompt in prompts]
