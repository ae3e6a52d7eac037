"""Text with the target's hidden state at every position: mostly text that the target writes itself.

A head is served on the target's own output, so that is what it is trained and measured on. Generation computes every
hidden state anyway; keeping them makes head training free of target forwards.
"""

from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM

from vllm_mtpc.train import corpus

PROMPT = 32


@dataclass(frozen=True)
class Samples:
    """Sequences: a prompt of ``prompt`` tokens, then the target's own continuation."""

    tokens: torch.Tensor  # [S, L] int64
    hidden: torch.Tensor  # [S, L - 1, D] float32, after the final norm; hidden[:, t] has read tokens[:, : t + 1]
    prompt: int


@torch.inference_mode()
def continue_prompts(
    model: LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int, temperature: float, generator: torch.Generator
) -> Samples:
    """Continues prompts[B, P] by ``new_tokens`` tokens; temperature 0 is greedy. End-of-text does not stop a row."""
    columns, states, cache, step = [prompts], [], None, prompts
    for _ in range(new_tokens):
        output = model.model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        states.append(output.last_hidden_state)  # [B, P or 1, D]
        logits = model.lm_head(states[-1][:, -1])  # [B, V]
        if temperature == 0:
            step = logits.argmax(-1, keepdim=True)
        else:
            step = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        columns.append(step)
    return Samples(torch.cat(columns, 1), torch.cat(states, 1), prompts.shape[1])


def generate(
    model: LlamaForCausalLM,
    part: corpus.Split,
    sequences: int,
    new_tokens: int,
    temperature: float,
    seed: int,
    batch: int = 256,
) -> Samples:
    """Continues ``sequences`` prompts cropped from ``part``; a fixed seed gives the same text."""
    generator = torch.Generator().manual_seed(seed)
    prompts = corpus.crops(part, sequences, PROMPT, generator)
    pieces = []
    for rows in tqdm(prompts.split(batch), desc=f"samples T={temperature:g}", unit="batch"):
        pieces.append(continue_prompts(model, rows, new_tokens, temperature, generator))
    return join(pieces)


@torch.inference_mode()
def read(model: LlamaForCausalLM, part: corpus.Split, sequences: int, length: int, seed: int) -> Samples:
    """Crops of the corpus itself, ``length`` tokens each: cheaper than writing, and wider."""
    tokens = corpus.crops(part, sequences, length, torch.Generator().manual_seed(seed))
    states = [model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state for rows in tokens.split(64)]
    return Samples(tokens, torch.cat(states), PROMPT)


def join(pieces: list[Samples]) -> Samples:
    """One set out of several of the same shape."""
    tokens = torch.cat([piece.tokens for piece in pieces])
    return Samples(tokens, torch.cat([piece.hidden for piece in pieces]), pieces[0].prompt)
