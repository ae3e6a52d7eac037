"""MtPC drafts on vLLM's V1 runner.

Algorithm (per request): take the target's hidden state at its last accepted token and the token x_1
the target chose there, observe x_1 in the circuit, draw x_2 .. x_{1+K} from the exact conditionals,
and keep those conditionals for vLLM's rejection sampler.

Differences from Model Runner V2: tokens arrive and leave as lists on the host, there is no counter
based noise (a seeded request draws from its own generator, as V1's verifier does), and the draft
probabilities are handed over normalised, after temperature.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_mtpc.proposers.load import load_served_head

GREEDY_BELOW = 1e-5  # vLLM's own threshold (v1/sample/sampler.py)


def head_dtype(target_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """dtype of the head's weights; the conditionals are float32 whatever it is.

    Reading the leaf weights is most of a draft on a CPU, and bfloat16 halves it where products are native.
    """
    if device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return target_dtype


class MtpcProposer:
    """Drafts for a batch; `model` is the head, buffers are allocated once."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        spec = vllm_config.speculative_config
        self.folder = spec.model_folder
        self.num_drafts = spec.num_speculative_tokens
        self.is_probabilistic = spec.draft_sample_method == "probabilistic"
        self.target_dtype = self.dtype = vllm_config.model_config.dtype
        max_num_reqs, vocab_size = vllm_config.scheduler_config.max_num_seqs, spec.head.vocab_size
        if self.is_probabilistic:
            shape = (max_num_reqs, self.num_drafts, vocab_size)
            self.draft_probs = torch.zeros(shape, dtype=torch.float32)
            self.noise = torch.ones(shape, dtype=torch.float32)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the head beside the target, on the target's device."""
        device = next(target_model.parameters()).device
        self.dtype = head_dtype(self.target_dtype, device)
        self.model = load_served_head(self.folder, self.dtype, device, target_model, self.target_dtype)
        if self.is_probabilistic:
            self.draft_probs, self.noise = self.draft_probs.to(device), self.noise.to(device)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM asks for this name when it builds a `custom_class` proposer; ours drafts in propose_drafts."""
        raise NotImplementedError("MtpcProposer drafts through propose_drafts, which gets hidden states")

    @torch.inference_mode()
    def propose_drafts(
        self,
        runner: Any,
        sampled_token_ids: list[list[int]],  # per request; [] where a prompt is not read to its end
        sampling_metadata: Any,
        sample_hidden_states: torch.Tensor,  # [num rows with logits, D]
        spec_decode_metadata: Any,
    ) -> list[list[int]]:
        """K drafts per request ([] for an unfinished prompt); leaves their probabilities with the runner."""
        rows = self._last_rows(sampled_token_ids, spec_decode_metadata)
        hidden = sample_hidden_states[rows].to(self.dtype)  # [B, D]
        first = torch.tensor([tokens[-1] if tokens else 0 for tokens in sampled_token_ids], device=hidden.device)
        is_sampled = self.is_probabilistic and not sampling_metadata.all_greedy
        if is_sampled:
            drafts = self._draw(hidden, first, sampled_token_ids, sampling_metadata)
            runner._draft_probs = self.draft_probs[: len(first)]
            runner._draft_prob_req_ids = runner.input_batch.req_ids.copy()
        else:
            drafts = self.model.circuit.greedy(self.model(hidden, self.num_drafts + 1), first[:, None])[:, 1:]
            runner._draft_probs = runner._draft_prob_req_ids = None
        return [row if tokens else [] for row, tokens in zip(drafts.tolist(), sampled_token_ids, strict=True)]

    @staticmethod
    def _last_rows(sampled_token_ids: list[list[int]], spec_decode_metadata: Any) -> torch.Tensor:
        """Row of each request's last accepted token among the rows with logits, [B]."""
        if spec_decode_metadata is None:
            return torch.arange(len(sampled_token_ids))
        num_rows = torch.tensor(spec_decode_metadata.num_draft_tokens) + 1
        num_kept = torch.tensor([max(len(tokens), 1) for tokens in sampled_token_ids])
        return num_rows.cumsum(0) - num_rows + num_kept - 1

    def _draw(
        self, hidden: torch.Tensor, first: torch.Tensor, sampled_token_ids: list[list[int]], sampling_metadata: Any
    ) -> torch.Tensor:
        """Drafts [B, K] at each request's temperature; fills draft_probs[:B] with the law they were drawn from."""
        batch, circuit = len(first), self.model.circuit
        temperature = sampling_metadata.temperature
        is_greedy = temperature < GREEDY_BELOW
        scale = torch.where(is_greedy, 1.0, temperature)[:, None]
        noise = self.noise[:batch].exponential_()
        for row, generator in sampling_metadata.generators.items():
            if sampled_token_ids[row]:  # an unfinished prompt must not advance its request's generator
                noise[row].exponential_(generator=generator)
        noise.clamp_(min=torch.finfo(torch.float32).tiny)  # 0 / 0 would win the race below

        params = self.model(hidden, self.num_drafts + 1)
        state = circuit.observe(params, circuit.start(params), 0, first)
        columns = []
        for k in range(1, self.num_drafts + 1):
            log_probs = circuit.next_log_probs(params, state, k)
            probs = self.draft_probs[:batch, k - 1].copy_((log_probs / scale).softmax(dim=-1))  # [B, V]
            race = (probs / noise[:, k - 1]).argmax(dim=-1)  # exponential race: a draw from probs
            columns.append(torch.where(is_greedy, probs.argmax(dim=-1), race))
            state = circuit.observe(params, state, k, columns[-1])
        return torch.stack(columns, dim=1)
