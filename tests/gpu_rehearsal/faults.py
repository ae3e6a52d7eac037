"""Faults that a rehearsal must find, each injected into the draft step of a speculator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def wait_for_item(speculator: Any) -> None:
    speculator.first_pos[0].item()


def copy_to_host(speculator: Any) -> None:
    speculator.first_tokens.cpu()


def make_tensor_on_device(speculator: Any) -> None:
    torch.tensor([0, 1], device=speculator.device)


def add_host_tensor(speculator: Any) -> None:
    speculator.first_pos + torch.zeros(len(speculator.first_pos), dtype=torch.int64)


def launch_with_host_tensor(speculator: Any) -> None:
    from vllm_mtpc.kernels.uniform.kernel import uniform

    uniform(torch.zeros(3, dtype=torch.int64), speculator.first_pos[:3])


def launch_with_wrong_dtype(speculator: Any) -> None:
    """A dtype that a branch of vLLM's kernel does not have: the cause of a start that failed."""
    from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words

    ints = torch.zeros(2, 2, dtype=torch.int32, device=speculator.device)
    row = ints[0]
    apply_bad_words(ints.float(), row, ints, ints, row, ints, row, row, row.long(), row, 1)


def compile_by_nvrtc(speculator: Any) -> None:
    torch.special.ndtri(speculator.temperature)


# Kind of the finding that each of them must lead to, and a part of its text.
FAULTS: dict[Callable[[Any], None], tuple[str, str]] = {
    wait_for_item: ("wait", "_local_scalar_dense"),
    copy_to_host: ("wait", "_to_copy to the host"),
    make_tensor_on_device: ("pageable copy", "torch.tensor(.., device=cuda)"),
    add_host_tensor: ("device", "aten::add.Tensor"),
    launch_with_host_tensor: ("device", "seed_ptr is a tensor of the host"),
    launch_with_wrong_dtype: ("type", "_bad_words_kernel"),
    compile_by_nvrtc: ("nvrtc", "special_ndtri"),
}


def inject(speculator: Any) -> None:
    """Run all faults in every draft step of a speculator."""
    draft_step = speculator._draft_step

    def faulty_step(*args: Any, **kwargs: Any) -> None:
        for fault in FAULTS:
            with contextlib.suppress(Exception):
                fault(speculator)
        draft_step(*args, **kwargs)

    speculator._draft_step = faulty_step
