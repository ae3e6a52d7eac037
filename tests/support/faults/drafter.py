"""How tests note, inside an engine's process, what vLLM's own DFlash and DSpark speculators draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support import engine


def note_their_drafts() -> Callable[[], None]:
    """Notes for every request of every step where its text ends, x_1 behind it, and what was drafted.

    On a CPU vLLM 0.32 norms the context's keys of every draft layer with the first layer's weights, as its rms_norm
    there takes one row of weights: here it is called for each layer, as on a GPU.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    propose, norm = DFlashSpeculator.propose, DFlashQwen3Model._normalize_context_k

    def noted(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, input_batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            for row, name in enumerate(input_batch.req_ids):
                query = self.input_buffers.query_start_loc[row]
                engine.RECORDED.append(
                    {
                        "request": int(name.partition("-")[0]),
                        "prefix": int(self.input_buffers.positions[query]),
                        "first": int(self.input_buffers.input_ids[query]),
                        "drafts": drafts[row].clone(),
                    }
                )
        return drafts

    def each_layers(self: Any, keys: Any) -> Any:
        out = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[layer], keys[layer], weight, self._rms_norm_eps)
        return out

    DFlashSpeculator.propose, DFlashQwen3Model._normalize_context_k = noted, each_layers

    def undo() -> None:
        DFlashSpeculator.propose, DFlashQwen3Model._normalize_context_k = propose, norm

    return undo


INJECTED = {"note their drafts": note_their_drafts}
