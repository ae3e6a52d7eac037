"""Faults of drafting and verification that distribution tests must find, injected inside an engine's process; and
lengths of drafts that change from step to step, which is no fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.support.engine import replaced

Undo = Callable[[], None]
LENGTHS = (3, 1, 0, 2)
UNIFORM = 0.15  # the share of a uniform distribution
MARKED = 0  # the token whose drafts are thrown away


def drop_recovered() -> Undo:
    """The fault of the paper's algorithm: after one or more accepted drafts, throw the recovered token away."""
    import vllm.v1.sample.rejection_sampler as module

    original = module.rejection_sample

    def rejection_sample(draft_token_ids: Any, num_draft_tokens: list[int], *args: Any, **kwargs: Any) -> Any:
        output = original(draft_token_ids, num_draft_tokens, *args, **kwargs)
        for row, drafted in zip(output, num_draft_tokens, strict=True):
            emitted = int((row >= 0).sum())
            if 1 < emitted <= drafted:
                row[emitted - 1] = -1
        return output

    return replaced(module, "rejection_sample", rejection_sample)


def drop_recovered_v2() -> Undo:
    """The same on Model Runner V2, which counts what it emits."""
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as module

    original = module.rejection_sample

    def rejection_sample(
        logits: Any, draft_logits: Any, drafts: Any, cu_num_logits: Any, *args: Any, **kwargs: Any
    ) -> Any:
        sampled, counts = original(logits, draft_logits, drafts, cu_num_logits, *args, **kwargs)
        drafted = cu_num_logits.diff() - 1
        return sampled, counts - ((counts > 1) & (counts <= drafted)).to(counts.dtype)

    return replaced(module, "rejection_sample", rejection_sample)


def other_temperature() -> Undo:
    """The target is scored at a temperature that is 1.25 times the request's."""
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as module

    original = module.rejection_sample
    return replaced(module, "rejection_sample", lambda logits, *args, **more: original(logits / 1.25, *args, **more))


def uniform_in_q() -> Undo:
    """The rejection sampler scores drafts by 0.85 q + 0.15 / V where they were drawn from q."""
    import vllm.v1.sample.rejection_sampler as module

    original = module.rejection_sample

    def rejection_sample(drafts: Any, num_drafts: Any, width: Any, ends: Any, q: Any, *args: Any, **more: Any) -> Any:
        mixed = (1 - UNIFORM) * q + UNIFORM / q.shape[-1]
        return original(drafts, num_drafts, width, ends, mixed, *args, **more)

    return replaced(module, "rejection_sample", rejection_sample)


def uniform_in_q_v2() -> Undo:
    """The same on Model Runner V2, of requests at temperature 1."""
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler as module

    original = module.rejection_sample

    def rejection_sample(logits: Any, draft_logits: Any, *args: Any, **more: Any) -> Any:
        mixed = (1 - UNIFORM) * draft_logits.float().softmax(-1) + UNIFORM / draft_logits.shape[-1]
        return original(logits, mixed.log(), *args, **more)

    return replaced(module, "rejection_sample", rejection_sample)


def one_stream() -> Undo:
    """Drafts of requests that are verified by rejection are drawn from the noise that samples."""
    from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator
    from vllm_mtpc.proposers.v2.verification import DRAFTING

    original = MtpcSpeculator._generate_draft

    def _draft(self: Any, *args: Any) -> None:
        self.noise_pos %= DRAFTING
        original(self, *args)

    return replaced(MtpcSpeculator, "_generate_draft", _draft)


def scored_without_tokens() -> Undo:
    """Drafts come from leaves that look at the token before, and are scored by those that do not."""
    from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator

    original = MtpcSpeculator._generate_draft

    def _draft(self: Any, *args: Any) -> None:
        original(self, *args)
        drawn = self.draft_tokens.clone()
        self.model.bigram = lambda *_: None  # hides the method
        original(self, *args)
        del self.model.bigram
        self.draft_tokens.copy_(drawn)

    return replaced(MtpcSpeculator, "_generate_draft", _draft)


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


def swapping() -> Undo:
    """No fault: before every step of the target "hmm, bad" takes the place of the served head, or gives it back."""
    from pathlib import Path

    from vllm_mtpc.proposers.patches.worker import HeadWorker

    folders: list[Path] = []

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        if not folders:
            own = Path(self.vllm_config.speculative_config.model_folder)
            folders.extend([own, own.parent / "hmm, bad"])
        folders.reverse()
        self.swap_head(str(folders[0]))
        return super(HeadWorker, self).execute_model(scheduler_output)

    HeadWorker.execute_model = execute_model
    return lambda: delattr(HeadWorker, "execute_model")


INJECTED = {
    "swapping": swapping,
    "drop_recovered": drop_recovered,
    "drop_recovered_v2": drop_recovered_v2,
    "other temperature": other_temperature,
    "uniform in q": uniform_in_q,
    "uniform in q, V2": uniform_in_q_v2,
    "one stream": one_stream,
    "scored without tokens": scored_without_tokens,
    "drawn cut": drawn_cut,
    "switching": switching,
}
