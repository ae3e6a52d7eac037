"""What greedy decoding with a head must do, step by step, from transformers' hidden states and lm_head alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from vllm_mtpc.checkpoint import load_head


class Step(NamedTuple):
    """Drafts of one step, and how many of them are the target's own next tokens."""

    drafts: list[int]
    accepted: int


class Prediction(NamedTuple):
    """One prompt's answer (longer than was asked for) and the steps that lead to it."""

    answer: list[int]
    steps: list[Step]
    last: list[int]  # drafts after the last step, which are not verified


def lm_head_of(target: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """transformers' lm_head with the soft cap of its forward, in the target's dtype."""
    cap = getattr(target.config, "final_logit_softcapping", None)

    def logits(states: Tensor) -> Tensor:
        found = target.lm_head(states.to(target.dtype))
        return found if cap is None else torch.tanh(found / cap) * cap

    return logits


@torch.inference_mode()
def predict(target_folder: Path, head_folder: Path, prompts: list[list[int]], length: int, dtype: torch.dtype) -> list:
    """A Prediction for each prompt and `length` tokens, of a head whose weights are in `dtype`."""
    # eager: transformers' other attentions leave out the soft cap of attention logits
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32, attn_implementation="eager")
    _, head = load_head(head_folder, dtype)
    if head.needs_lm_head:
        head.bind_lm_head(lm_head_of(target))
    window = head.circuit.window
    found = []
    for prompt in prompts:
        text = torch.tensor([prompt])
        for _ in range(length + window):  # the last step may draft beyond the last token that is asked for
            text = torch.cat([text, target(text).logits[:, -1:].argmax(-1)], 1)
        hidden = target.model(text).last_hidden_state[0]

        def drafts_at(end: int, hidden: Tensor = hidden, text: Tensor = text) -> Tensor:
            params = head(hidden[end - 2 : end - 1].to(dtype))
            return head.circuit.greedy(params, text[:, end - 1 : end])[0, 1:]

        end, steps = len(prompt) + 1, []  # tokens so far; the first one comes from reading the prompt
        while end < len(prompt) + length:
            drafts = drafts_at(end)
            accepted = int((drafts == text[0, end : end + window - 1]).long().cumprod(0).sum())
            steps.append(Step(drafts.tolist(), accepted))
            end += accepted + 1
        found.append(Prediction(text[0, len(prompt) :].tolist(), steps, drafts_at(end).tolist()))
    return found
