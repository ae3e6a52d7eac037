"""What the tests of PTP change or note inside an engine's process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.support import engine

ORACLE_SEED = 7


def coupled_without_drafts() -> Callable[[], None]:
    """Plain vLLM whose sampler picks with u: what every run with drafts must say."""
    import vllm.v1.worker.gpu.model_runner as runner

    from vllm_mtpc.proposers.v2.verification import CoupledSampler

    return engine.replaced(runner, "Sampler", CoupledSampler)


def oracle() -> Callable[[], None]:
    """Drafts are what the engine before said to the same call, wrong from a random place on."""
    from vllm_mtpc.proposers.v2.ptp.merged import MergedSpeculator as Owner

    coin = random.Random(ORACLE_SEED)
    texts = list(engine.TEXTS)
    original = Owner.propose

    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = original(self, input_batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return drafts
        num_sampled, num_rejected = args[4], args[5]
        for row, name in enumerate(input_batch.req_ids):
            if int(num_sampled[row]) == 0:
                continue
            text = texts[int(name.partition("-")[0])]  # offline, vLLM counts the requests of an engine from 0
            last = int(input_batch.query_start_loc[row + 1] - num_rejected[row]) - 1
            first = int(input_batch.positions[last]) + 2  # index of the first draft: behind the token just chosen
            right = text[first : first + drafts.shape[1]]
            keep = coin.randint(0, drafts.shape[1])
            told = [*right[:keep], *((token + 1) % 8 for token in right[keep:])]
            drafts[row, : len(told)] = torch.tensor(told, dtype=drafts.dtype)
        return drafts

    return engine.replaced(Owner, "propose", propose)


def record_groups() -> Callable[[], None]:
    """Notes, for every pass, the states of each group's auxiliary rows and what it stood behind."""
    from vllm_mtpc.proposers.v2.ptp.merged import MergedSpeculator as Owner
    from vllm_mtpc.proposers.v2.ptp.ptp_speculator import PtpSpeculator

    original, generate = Owner.propose, PtpSpeculator._generate_draft
    second_pass = PtpSpeculator._run_draft_pass

    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafted = self.merged_output
        if drafted is not None and not kwargs.get("dummy_run"):
            layout, num_sampled = drafted.layout, args[4]
            accepted = (num_sampled[: input_batch.num_reqs].long() - 1).clamp(min=0)
            start, size = layout.find_group(accepted)
            for row in range(input_batch.num_reqs):
                if int(num_sampled[row]) == 0 or int(size[row]) == 0:
                    continue
                first = row * layout.rows + int(start[row])
                engine.RECORDED.append(
                    {
                        "request": input_batch.req_ids[row],
                        "prefix": int(drafted.position[row] + 1 + accepted[row]),
                        "accepted": int(accepted[row]),
                        "hidden": drafted.hidden[first : first + int(size[row])].clone(),
                    }
                )
        return original(self, input_batch, *args, **kwargs)

    def _generate_draft(self: Any, input_batch: Any, num_sampled: torch.Tensor, drafts: torch.Tensor) -> None:
        self.is_sampled = num_sampled.tolist()
        generate(self, input_batch, num_sampled, drafts)

    def _run_draft_pass(self: Any, input_batch: Any, num_aux: int) -> torch.Tensor:
        hidden = second_pass(self, input_batch, num_aux)
        for row, name in enumerate(input_batch.req_ids):
            if self.is_sampled[row]:  # x_1 is the group's first row
                prefix = int(self.prefix_lens[row]) + 1
                engine.RECORDED.append({"request": name, "prefix": prefix, "hidden": hidden[row, 1:].clone()})
        return hidden

    undo = [
        engine.replaced(Owner, "propose", propose),
        engine.replaced(PtpSpeculator, "_generate_draft", _generate_draft),
        engine.replaced(PtpSpeculator, "_run_draft_pass", _run_draft_pass),
    ]
    return lambda: [back() for back in undo] and None


def record_drafts() -> Callable[[], None]:
    """Notes the drafts of every step, and how many tokens are in front of them."""
    from vllm_mtpc.proposers.v2.ptp.merged import MergedSpeculator
    from vllm_mtpc.proposers.v2.ptp.ptp_speculator import PtpSpeculator

    def noting(owner: type) -> Callable[[], None]:
        original = owner.propose

        def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            drafts = original(self, input_batch, *args, **kwargs)
            num_sampled, num_rejected = args[4], args[5]
            for row, name in enumerate([] if kwargs.get("dummy_run") else input_batch.req_ids):
                if int(num_sampled[row]):
                    last = int(input_batch.query_start_loc[row + 1] - num_rejected[row]) - 1
                    known = int(input_batch.positions[last]) + 2
                    engine.RECORDED.append({"request": name, "known": known, "drafts": drafts[row].tolist()})
            return drafts

        return engine.replaced(owner, "propose", propose)

    undo = [noting(MergedSpeculator), noting(PtpSpeculator)]
    return lambda: [back() for back in undo] and None


def record_real_rows() -> Callable[[], None]:
    """Notes the states of the target's own rows of every merged pass."""
    from vllm_mtpc.proposers.v2.ptp.merged import MergedSpeculator as Owner

    original = Owner._run_merged_pass

    def _run_merged_pass(self: Any, step: Any, *args: Any) -> torch.Tensor:
        hidden = original(self, step, *args)
        engine.RECORDED.append(hidden[: step.num_tokens].clone())
        return hidden

    return engine.replaced(Owner, "_run_merged_pass", _run_merged_pass)


def replayed() -> Callable[[], None]:
    """The student's passes are captured at the first step and replayed, with a stand-in for CUDA's graphs.

    Notes whether each step was replayed, and whether it drafts what it drafts without graphs.
    """
    from contextlib import ExitStack
    from unittest import mock

    from vllm.config.compilation import CUDAGraphMode

    from tests.support.speculators import Recorder
    from vllm_mtpc.proposers.v2.ptp import ptp_speculator as module

    stack, recorder, Owner = ExitStack(), Recorder(), module.PtpSpeculator
    stack.enter_context(recorder.in_place())
    stack.enter_context(mock.patch.object(module, "CAPTURED", ("CPU_ATTN",)))
    init, propose = Owner.init_cudagraph_manager, Owner.propose

    def init_cudagraph_manager(self: Any, mode: CUDAGraphMode) -> None:
        compilation = self.vllm_config.compilation_config
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [2, 4], 4
        init(self, CUDAGraphMode.FULL_DECODE_ONLY)

    def captured(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dummy_run"):
            return propose(self, *args, **kwargs)
        if not self.graphs.graphs:
            self.capture()
            assert self.graphs.graphs
        before = len(recorder.replayed)
        drafts = propose(self, *args, **kwargs).clone()
        replays = len(recorder.replayed) - before
        with mock.patch.object(self.graphs, "find", lambda *batch: None):
            engine.RECORDED.append((replays, torch.equal(drafts, propose(self, *args, **kwargs))))
        return drafts

    stack.enter_context(mock.patch.object(Owner, "init_cudagraph_manager", init_cudagraph_manager))
    stack.enter_context(mock.patch.object(Owner, "propose", captured))
    return stack.close


def squared_u() -> Callable[[], None]:
    """A fault: u is no longer uniform, for drafter and verifier alike, so that only the distribution can tell."""
    from vllm_mtpc.proposers.v2 import verification
    from vllm_mtpc.proposers.v2.ptp import ptp_speculator

    original = verification.u_of

    def u_of(*args: Any) -> torch.Tensor:
        return original(*args) ** 2

    undo = [engine.replaced(module, "u_of", u_of) for module in (verification, ptp_speculator)]
    return lambda: [back() for back in undo] and None


INJECTED = {
    "squared_u": squared_u,
    "coupled_without_drafts": coupled_without_drafts,
    "oracle": oracle,
    "record_groups": record_groups,
    "record_drafts": record_drafts,
    "record_real_rows": record_real_rows,
    "replayed": replayed,
}
