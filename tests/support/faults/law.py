"""Faults of drafting and verification that the laws of Model Runner V2 must find, planted inside an engine's process,
and lengths of drafts that change from step to step, which they must not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.support.engine import replaced

Undo = Callable[[], None]
LENGTHS = (3, 1, 0, 2)
MARKED = 0  # the token whose drafts are thrown away


def other_temperature() -> Undo:
    """The target is scored at a temperature that is 1.25 times the request's."""
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as module

    original = module.rejection_sample
    return replaced(module, "rejection_sample", lambda logits, *args, **more: original(logits / 1.25, *args, **more))


def one_stream() -> Undo:
    """Drafts of requests that are verified by rejection are drawn from the noise that samples."""
    from vllm_mtpc.proposers.v2.seeded import DRAFTING
    from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator

    original = MtpcSpeculator._draft

    def _draft(self: Any, *args: Any) -> None:
        self.noise_pos %= DRAFTING
        original(self, *args)

    return replaced(MtpcSpeculator, "_draft", _draft)


def drawn_cut() -> Undo:
    """How many drafts are verified depends on which were drawn: none from the first MARKED one on."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    original = GPUModelRunner.take_draft_token_ids

    def take_draft_token_ids(self: Any) -> Any:
        made, states = original(self), self.req_states
        for row, name in enumerate(made.req_ids if made else ()):
            drawn = states.draft_tokens[states.req_id_to_index[name], : len(made.draft_token_ids[row])].tolist()
            made.draft_token_ids[row] = list(itertools.takewhile(lambda token: token != MARKED, drawn))
        return made

    return replaced(GPUModelRunner, "take_draft_token_ids", take_draft_token_ids)


def switching() -> Undo:
    """No fault: one step drafts 3, the next 1, the next 0, the next 2, whatever was drawn."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original, lengths = Scheduler.schedule, itertools.cycle(LENGTHS)

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.dynamic_sd_lookup = [next(lengths)] * (1 + self.max_num_running_reqs)
        return original(self, *args, **kwargs)

    return replaced(Scheduler, "schedule", schedule)


PLANTS = {
    "other temperature": other_temperature,
    "one stream": one_stream,
    "drawn cut": drawn_cut,
    "switching": switching,
}
