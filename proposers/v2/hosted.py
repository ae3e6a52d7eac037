"""MtPC drafts from the states of a drafter that vLLM serves, on Model Runner V2.

The drafter (the target's MTP layers, EAGLE-3, DFlash or DSpark) is vLLM's own speculator with its loading, KV cache,
attention and CUDA graphs. It differs in one place: where it would sample drafts from its states, it keeps the states.

Algorithm, after every target forward pass, also in steps without drafts:
  1. the drafter's pass over the rows of the target's batch, or over its block of queries: [Q, D] of each request, Q = 1
     for MTP layers and EAGLE-3, whose state predicts x_2 given x_1, and n - 1 for DFlash and DSpark;
  2. the head (`vllm_mtpc/heads/trunk/drafter.py`) computes the circuit from these states, and the drafts
     x_2 .. x_{K+1} are sampled as for every head (`speculator.py`).

vLLM's own MTP and EAGLE-3 drafts run the drafter K times, each with its lm_head; here it runs once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtpc.heads.head import Head
from vllm_mtpc.proposers.v2.draft_graphs import replace_attributes
from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator
from vllm_mtpc.proposers.worker.load import DrafterLmHead

SPECULATORS: dict[str, type[DraftModelSpeculator]] = {
    "mtp": MTPSpeculator,
    "eagle3": EagleSpeculator,
    "dflash": DFlashSpeculator,
    "dspark": DSparkSpeculator,
}


class KeepStates(DraftModelSpeculator):
    """Mixed into a speculator of vLLM: `kept` [max_num_reqs, Q, D] are the states that it would sample drafts from."""

    num_speculative_steps: int
    rows_of_request: int  # of a request in the target's batch, which the graphs of MTP and EAGLE-3 have

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        shape = self.max_num_reqs, self.num_speculative_steps, self.draft_model_config.get_hidden_size()
        self.kept = torch.zeros(shape, dtype=self.dtype, device=device)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        has_norm = self.method == "mtp"  # of some models in compute_logits; the others return normalised states
        self.lm_head = DrafterLmHead(self.model, self.kept.shape[2], self.dtype) if has_norm else None

    def sample_draft(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Keep states [R * Q, D], and return tokens [R * Q] that nothing reads."""
        if self.lm_head is not None:
            hidden_states = self.lm_head.normalised(hidden_states)
        states = hidden_states.view(-1, *self.kept.shape[1:])
        self.kept[: len(states)] = states
        return self.draft_tokens[: len(states)].flatten()

    def _sample_sequential(self, num_reqs: int, head_hidden: Tensor) -> None:  # DSpark's
        self.sample_draft(head_hidden[self.sample_indices[: num_reqs * self.num_speculative_steps]])

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        steps = self.num_speculative_steps
        if not isinstance(self, DFlashSpeculator):  # its graphs are of the target's rows
            self.num_speculative_steps = self.rows_of_request - 1
        super().init_cudagraph_manager(cudagraph_mode)
        self.num_speculative_steps = steps


@cache
def hosted_class(method: str) -> type[KeepStates]:
    """Return vLLM's speculator of a method, keeping states."""
    base = SPECULATORS[method]
    return type(f"Hosted{base.__name__}", (KeepStates, base), {})


class HostedSpeculator(MtpcSpeculator):
    """The drafts of a head on the states of vLLM's drafter.

    Attributes:
        host: the drafter's speculator; `hidden_states` [max_num_reqs, Q, D] is what it keeps.
    """

    copies_states = False

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        drafter = self.speculative_config.hosted
        self.host = hosted_class(drafter.method)(replace_attributes(vllm_config, speculative_config=drafter), device)
        self.host.rows_of_request = 1 + self.num_speculative_steps
        self.num_query_per_req = self.host.num_query_per_req
        self.hidden_states = self.host.kept

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.supports_mm_inputs = self.host.supports_mm_inputs

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        drafter = self.speculative_config.hosted
        if self.speculative_config.reads_aux:
            set_eagle3_aux_hidden_state_layers(target_model, drafter)
        self.host.load_model(target_model)
        return super().load_draft_model(target_model, target_attn_layer_names)

    def _load_head(self, target_model: nn.Module) -> Head:
        return super()._load_head(self.host.lm_head or self.host.model)

    def set_attn(self, *args: Any) -> None:
        super().set_attn(*args)
        self.host.set_attn(*args)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.host.init_cudagraph_manager(cudagraph_mode)
        super().init_cudagraph_manager(cudagraph_mode)

    def capture(self) -> None:
        self.host.capture()
        super().capture()

    def drop_profiled_graphs(self) -> None:
        held = [name for name, value in vars(self.host).items() if isinstance(value, CudaGraphManager)]
        self.host.__dict__.update(dict.fromkeys(held))

    @torch.inference_mode()
    def propose(self, *step: Any, **options: Any) -> Tensor:
        """Run the drafter, then draft from its states; arguments and result as in HeadSpeculator."""
        self.host.propose(*step, **options | {"num_speculative_tokens": None})
        return super().propose(*step, **options)
