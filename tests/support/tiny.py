"""Targets and heads whose distributions can be enumerated."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.eval.acceptance import _at_contexts, along_text
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.heads import build_head
from vllm_mtpc.hf import Target

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
    return _at_contexts(log_q, target, states, tokens, sampling)[:, : tokens.shape[1] - 1]


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
        """Texts of ``length`` tokens behind random prompts of two."""
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(0, V, (rows, 2), generator=generator)
        for _ in range(length):
            p = self.logits(self.states(text[:, -2:])[:, 0]).softmax(-1)
            new = p.argmax(-1, keepdim=True) if greedy else torch.multinomial(p, 1, generator=generator)
            text = torch.cat([text, new], 1)
        # The state before the first pair does not exist; it belongs to the prompt and is not read.
        hidden = torch.cat([torch.zeros(rows, 1, D), self.states(text)], 1)[:, :-1]
        return Samples(text, hidden, torch.full((rows,), 2), torch.full((rows,), 2 + length))


class TableSession:
    """What a decoding loop needs of a ``Session``, on a TableTarget."""

    def __init__(self, target: TableTarget):
        self.target = target

    def start(self, prompts: list[torch.Tensor]) -> torch.Tensor:
        self.tokens = prompts[0].tolist()
        return self.target.states(prompts[0][None])

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens += tokens[0].tolist()
        return self.target.states(torch.tensor([self.tokens[-tokens.shape[1] - 1 :]]))

    def crop(self, forget: int) -> None:
        del self.tokens[len(self.tokens) - forget :]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.logits(hidden)


def llama_target(
    vocab_size: int = 32, seed: int = 3, eos: int | None = None, sliding_window: int | None = None
) -> Target:
    """A random two-layer Llama in float32 without a tokenizer; with a sliding window, a Mistral."""
    torch.manual_seed(seed)
    make, build = (MistralConfig, MistralForCausalLM) if sliding_window else (LlamaConfig, LlamaForCausalLM)
    more = {"sliding_window": sliding_window} if sliding_window else {}
    config = make(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=eos,
        **more,
    )
    model = build(config).eval().requires_grad_(False)
    return Target("tiny", model, None, model.base_model, model.get_output_embeddings(), "torch")
