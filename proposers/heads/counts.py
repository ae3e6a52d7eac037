"""Drafts that were cut, counted where they are made, and ranks that are held to the same drafts.

A step's output takes the counts along to the scheduler (patches/scheduler.py), which adds the steps and puts them
behind
vLLM's own counts of speculative decoding, which are of steps that verified drafts; patches/configured.py logs both.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed import get_tp_group

from vllm_mtpc.proposers.config.switches import DEBUG, is_on

# Drafts that a head had room for and that were not verified: the plan or the schedule has fewer, they were unlikely to
# survive, a step had no room left for them (token budget, length, a grammar), or the request asked for fewer.
CUTS = ("schedule", "survival", "budget", "request")
CLASSES = ("greedy", "sampled", "structured")  # of requests: their drafts are accepted unlike each other's
OF_CLASS = ("steps", "draft_tokens", "accepted_tokens")
# steps of the target, summed over requests: each gives a token and the accepted drafts
NAMES = ("steps", *CUTS, *(f"{kind} {what}" for kind in CLASSES for what in OF_CLASS))
CUT = "vllm_mtpc_cut"  # attribute of a ModelRunnerOutput: what was cut
IDLE = "vllm_mtpc_idle"  # attribute of a ModelRunnerOutput: the head that the target bundles has failed


def put_into(stats: Any, counts: dict[str, int]) -> None:
    """Behind the K counts of a list of vLLM's SpecDecodingStats: between its processes nothing is sent but what the
    class declares. Nothing of vLLM reads that list."""
    stats.num_draft_tokens_per_pos += [counts.get(name, 0) for name in NAMES]


def class_of(request: Any) -> str:
    """Of vLLM's Request."""
    if request.use_structured_output:
        return "structured"
    return "sampled" if request.sampling_params is None or request.sampling_params.temperature > 0 else "greedy"


def by_class(requests: Mapping[str, Any], verified: Mapping[str, Any], output: Any) -> Counter[str]:
    """Counts of one step by the class of its requests. verified: drafts by request; output: a ModelRunnerOutput."""
    counts = Counter[str]()
    for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
        if len(tokens) and (request := requests.get(name)) is not None:
            kind = class_of(request)
            counts[f"{kind} steps"] += 1
            counts[f"{kind} draft_tokens"] += len(verified.get(name, ()))
            counts[f"{kind} accepted_tokens"] += len(tokens) - 1
    return counts


def counts_of(stats: Any) -> Counter[str]:
    """What was put into a SpecDecodingStats; nothing where nothing was: other methods, other engines."""
    return Counter(dict(zip(NAMES, stats.num_draft_tokens_per_pos[stats.num_spec_tokens :], strict=False)))


def watch_speculator(speculator: Any) -> None:
    """Count what the schedule cuts of a speculator of Model Runner V2, as `speculator.cut`; compare ranks if asked."""
    most, propose, is_checked = speculator.num_speculative_steps, speculator.propose, is_on(DEBUG, "0")
    speculator.cut = Counter[str]()

    def watched(input_batch: Any, *args: Any, **given: Any) -> Any:
        drafts = propose(input_batch, *args, **given)
        if not given.get("dummy_run"):
            count = given.get("num_speculative_tokens")
            count = most if count is None else count
            speculator.cut["schedule"] += (most - count) * input_batch.num_reqs
            if is_checked and count:
                check_ranks(drafts[:, :count].tolist())
        return drafts

    speculator.propose = watched


def with_counts(output: Any, drafter: Any) -> Any:
    """The output of a step, of either runner, which takes along what was cut of its drafts, or that nothing drafts."""
    made = getattr(output, "model_runner_output", output)  # in the place of which vLLM may have one that is to come
    if getattr(made, "req_ids", None):
        if getattr(drafter, "is_idle", False):  # a head that the target bundles has failed
            setattr(made, IDLE, True)
        elif hasattr(drafter, "cut"):
            setattr(made, CUT, dict(drafter.cut))
            drafter.cut.clear()
    return output


def check_ranks(drafts: list[list[int]]) -> None:
    """Raise RuntimeError on every rank unless all tensor-parallel ranks have drafted the same."""
    group = get_tp_group()
    if group.world_size == 1:
        return
    own = torch.tensor([zlib.crc32(repr(drafts).encode())])
    sums = [torch.empty_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(sums, own, group=group.cpu_group)
    found = [f"{int(one):08x}" for one in sums]
    if len(set(found)) > 1:
        raise RuntimeError(
            f"{DEBUG}: the tensor-parallel ranks have drafted different tokens (checksums by rank: {', '.join(found)}; "
            f"rank {group.rank_in_group} drafted {drafts}); the verifier would read different texts"
        )
