"""Counts of steps and pruned drafts, from the worker to the front end, and the comparison of ranks' drafts.

On V1 the output of a step carries the pruned drafts to the scheduler; on V2 the scheduler computes them. It adds the
number of steps and appends all to vLLM's own counts (patches/scheduler.py). patches/metrics.py logs and exports both.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed import get_tp_group

from vllm_mtpc.proposers.config.switches import DEBUG, is_on

# Reasons why a draft was not verified: fewer were planned or scheduled, its cumulative acceptance was too small, the
# step had no room for it (token budget, length, a grammar), or the request asked for fewer.
PRUNED_BY = ("schedule", "confidence", "budget", "request")
CLASSES = ("greedy", "sampled", "structured")  # of requests, whose acceptance differs
OF_CLASS = ("steps", "draft_tokens", "accepted_tokens")
# "steps": steps of the target, summed over requests; each emits one token and the accepted drafts
NAMES = ("steps", *PRUNED_BY, *(f"{kind} {what}" for kind in CLASSES for what in OF_CLASS))
PRUNED = "vllm_mtpc_pruned"  # attribute of a ModelRunnerOutput: pruned drafts by reason
IDLE = "vllm_mtpc_idle"  # attribute of a ModelRunnerOutput: the bundled head has failed


def append_counts(stats: Any, counts: dict[str, int]) -> None:
    """Append counts to the K numbers of a list of vLLM's SpecDecodingStats; vLLM does not read them."""
    stats.num_draft_tokens_per_pos += [counts.get(name, 0) for name in NAMES]


def read_counts(stats: Any) -> Counter[str]:
    """Return the counts that were appended to a SpecDecodingStats; empty for other methods."""
    return Counter(dict(zip(NAMES, stats.num_draft_tokens_per_pos[stats.num_spec_tokens :], strict=False)))


def count_by_class(requests: Mapping[str, Any], verified: Mapping[str, Any], output: Any) -> Counter[str]:
    """Return the counts of one step by the class of its requests; verified: draft tokens by request id."""
    counts = Counter[str]()
    for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
        if len(tokens) and (request := requests.get(name)) is not None:
            sampling = request.sampling_params
            kind = "sampled" if sampling is None or sampling.temperature > 0 else "greedy"
            kind = "structured" if request.use_structured_output else kind
            counts[f"{kind} steps"] += 1
            counts[f"{kind} draft_tokens"] += len(verified.get(name, ()))
            counts[f"{kind} accepted_tokens"] += len(tokens) - 1
    return counts


def check_speculator(speculator: Any) -> None:
    """Compare the drafts of a V2 speculator over ranks in every step, if MTPC_DEBUG is set."""
    propose = speculator.propose

    def checked(input_batch: Any, *args: Any, **given: Any) -> Any:
        drafts, count = propose(input_batch, *args, **given), given.get("num_speculative_tokens")
        if not given.get("dummy_run") and count != 0:
            check_ranks(drafts[:, :count].tolist())
        return drafts

    if is_on(DEBUG, "0"):
        speculator.propose = checked


def attach_counts(output: Any, drafter: Any) -> Any:
    """Return the output of a step of either runner, with its pruned drafts or the note that nothing drafts."""
    made = getattr(output, "model_runner_output", output)  # of asynchronous scheduling
    if getattr(made, "req_ids", None):
        if getattr(drafter, "is_idle", False):
            setattr(made, IDLE, True)
        elif hasattr(drafter, "pruned"):
            setattr(made, PRUNED, dict(drafter.pruned))
            drafter.pruned.clear()
    return output


def check_ranks(drafts: list[list[int]]) -> None:
    """Raise RuntimeError on every rank unless all tensor-parallel ranks have the same drafts."""
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
            f"rank {group.rank_in_group} drafted {drafts})"
        )
