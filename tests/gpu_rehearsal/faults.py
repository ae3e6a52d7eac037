"""Faults that a rehearsal must find, each injected into the draft step of a speculator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def launch_with_host_tensor(speculator: Any) -> None:
    from vllm_mtpc.kernels.uniform.kernel import uniform

    uniform(torch.zeros(3, dtype=torch.int64), speculator.first_pos[:3])


def launch_with_wrong_dtype(speculator: Any) -> None:
    """A dtype that a branch of vLLM's kernel does not have: the cause of a start that failed."""
    from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words

    ints = torch.zeros(2, 2, dtype=torch.int32, device=speculator.device)
    row = ints[0]
    apply_bad_words(ints.float(), row, ints, ints, row, ints, row, row, row.long(), row, 1)


# The fault, the kind of the finding that it must lead to, and a part of the finding's text
FAULTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "item": (lambda made: made.first_pos[0].item(), "wait", "_local_scalar_dense"),
    "copy to the host": (lambda made: made.first_tokens.cpu(), "wait", "_to_copy to the host"),
    "tensor made on the device": (
        lambda made: torch.tensor([0, 1], device=made.device), "pageable copy", "torch.tensor(.., device=cuda)"
    ),
    "sum with the host": (
        lambda made: made.first_pos + torch.zeros(len(made.first_pos), dtype=torch.int64), "device", "aten::add.Tensor"
    ),
    "launch with a tensor of the host": (launch_with_host_tensor, "device", "seed_ptr is a tensor of the host"),
    "launch with a wrong dtype": (launch_with_wrong_dtype, "type", "_bad_words_kernel"),
    "NVRTC": (lambda made: torch.special.ndtri(made.temperature), "nvrtc", "special_ndtri"),
}  # fmt: skip


def inject(speculator: Any) -> None:
    """Run all faults in every draft step of a speculator."""
    draft_step = speculator._draft_step

    def faulty_step(*args: Any, **kwargs: Any) -> None:
        for fault, *_ in FAULTS.values():
            with contextlib.suppress(Exception):
                fault(speculator)
        draft_step(*args, **kwargs)

    speculator._draft_step = faulty_step
