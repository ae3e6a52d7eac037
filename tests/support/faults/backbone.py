"""What the tests of served backbones note, break, or have done by graphs, inside an engine's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.support import engine
from tests.support.faults.layer import noting


def _noting() -> Callable[[], None]:
    from vllm_mtpc.proposers.v2.backbone_speculator import BackboneSpeculator

    return noting(BackboneSpeculator)


def _context_one_on() -> Callable[[], None]:
    """Keys of the text are rotated for the position behind theirs."""
    from vllm_mtpc.proposers.v2.backbone_speculator import ServedBackbone as Owner

    original = Owner.write_context
    return engine.replaced(
        Owner, "write_context", lambda self, states, positions, slots: original(self, states, positions + 1, slots)
    )


def _unread_chunks() -> Callable[[], None]:
    """Nothing is written where a step samples nothing: pieces of a prompt are missing in the cache."""
    from vllm_mtpc.proposers.v2.backbone_speculator import BackboneSpeculator as Owner

    propose, write = Owner.propose, Owner._write_context

    def noting(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.samples_nothing = not kwargs.get("dummy_run") and not args[5].any()  # num_sampled
        return propose(self, *args, **kwargs)

    def _write_context(self: Any, start: int, stop: int) -> None:
        if not self.samples_nothing:
            write(self, start, stop)

    Owner.propose, Owner._write_context = noting, _write_context

    def undo() -> None:
        Owner.propose, Owner._write_context = propose, write

    return undo


def _causal() -> Callable[[], None]:
    """Queries read what is before them only."""
    from vllm_mtpc.proposers.v2 import backbone_speculator as backbone

    original = backbone.build_attn_metadata
    return engine.replaced(backbone, "build_attn_metadata", lambda **given: original(**{**given, "causal": True}))


def _in_graphs() -> Callable[[], None]:
    """Drafts come from graphs, which a stand-in for CUDA's calls again; batches of 1 and 3 are padded."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    from tests.support.speculators import Recorder
    from vllm_mtpc.proposers.v2.backbone_speculator import BackboneSpeculator as Owner

    recorder = Recorder()
    init, propose = Owner.init_cudagraph_manager, Owner.propose

    def init_cudagraph_manager(self: Any, mode: Any) -> None:
        config = self.vllm_config.compilation_config
        sizes = mock.patch.multiple(config, cudagraph_capture_sizes=[2, 4], max_cudagraph_capture_size=4)
        support = mock.Mock(min_cg_support=AttentionCGSupport.UNIFORM_BATCH)
        with recorder.in_place(), sizes, mock.patch.object(self, "attn_cg_support", support):
            init(self, CUDAGraphMode.FULL)

    def from_graphs(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dummy_run"):
            return propose(self, *args, **kwargs)
        with recorder.in_place():
            if not recorder.captured:
                kept = self.block_tables.slot_mappings.clone()  # of the step under way
                self.capture()
                self.block_tables.slot_mappings.copy_(kept)
            drafts = propose(self, *args, **kwargs)
        engine.RECORDED.append({"replayed": len(recorder.replayed)})
        return drafts

    Owner.init_cudagraph_manager, Owner.propose = init_cudagraph_manager, from_graphs

    def undo() -> None:
        Owner.init_cudagraph_manager, Owner.propose = init, propose

    return undo


def _with(more: Callable[[], Callable[[], None]] | None) -> Callable[[], Callable[[], None]]:
    def inject() -> Callable[[], None]:
        undo = [_noting(), *([more()] if more else [])]
        return lambda: [back() for back in reversed(undo)] and None

    return inject


FAULTS = {"context one on": _context_one_on, "unread chunks": _unread_chunks, "causal": _causal}
INJECTED = {
    "backbone": _with(None),
    "backbone in graphs": _with(_in_graphs),
    **{f"backbone {name}": _with(fault) for name, fault in FAULTS.items()},
}
