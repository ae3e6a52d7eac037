"""The V1 proposer of a head that its target ships: one that fails to load, or to draft once, drafts nothing."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_mtpc.kernels.draft import naive
from vllm_mtpc.proposers.heads import shipped
from vllm_mtpc.proposers.v1.proposer import MtpcProposer


class ShippedProposer(MtpcProposer):
    def __init__(self, vllm_config: VllmConfig) -> None:
        self.is_idle, self.given = False, vllm_config.speculative_config.model_folder
        self._attempt(lambda: super(ShippedProposer, self).__init__(vllm_config))

    def load_model(self, target_model: torch.nn.Module) -> None:
        def load_and_draft() -> None:
            super(ShippedProposer, self).load_model(target_model)
            self._draft_once(next(target_model.parameters()).device)

        if not self.is_idle:
            self._attempt(load_and_draft)

    @torch.inference_mode()
    def _draft_once(self, device: torch.device) -> None:
        """Kernels are compiled by the first draft; vLLM's profile of V1 runs none."""
        head = self.model
        states = torch.zeros(1, head.hidden_size, dtype=self.target_dtype, device=device)
        params = head.draft_params(states, torch.zeros(1, dtype=torch.int64, device=device), self.num_drafts)
        naive.draft(head.circuit.program, *params, lambda log_q, k: log_q.argmax(dim=-1), shard=head.leaf_shard)

    def _attempt(self, call: Any) -> None:
        try:
            shipped.attempt(call, self.given)
        except shipped.GivenUp:
            self.is_idle = True
            for name in ("model", "draft_probs", "noise"):
                vars(self).pop(name, None)
            shipped.release()

    def propose_drafts(self, runner: Any, sampled_token_ids: list[list[int]], *args: Any) -> list[list[int]]:
        if not self.is_idle:
            return super().propose_drafts(runner, sampled_token_ids, *args)
        runner._draft_probs = runner._draft_prob_req_ids = None
        return [[] for _ in sampled_token_ids]
