"""Every kernel compiled for GPUs that are not there; nothing is compiled once requests are served."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.support import forks
from tests.support.interpreted import launched_kernels

# One of each kernel, at the sizes with most in registers; the other circuits are the same code with a smaller stack,
# and kernels without tokens, draws or ranks a part of those with them.
QUICK = (
    *("demo btree, float64", "demo btree, token 32", "EvaByte btree, token 64, float32"),
    *("Qwen btree, token 64, float32", "Qwen btree, token 64, float64", "Qwen btree, token 64, 2 ranks"),
    *("128 components", "128 components, circuit alone", "demo btree, masked", "Qwen btree, 8 ranks, masked"),
    *("Qwen btree, low rank 64, float64", "Qwen btree, low rank 16, float32, token 32"),
    *("EvaByte B=64, float32", "training btree n=16 r=32", "training bfloat16", "PTP V=128256", "rows"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(chip: int, names: tuple[str, ...] = ()) -> None:
    from tests.support import compiled

    rows = list(compiled.rows(chip, names))
    assert {row["kernel"] for row in rows} == launched_kernels("kernels", "proposers")
    assert not [row for row in rows if row["spilled"] or row["shared"] > compiled.SHARED]
    assert max(row["registers"] for row in rows if row["kernel"] == "draft_rows") <= 128, "two instances at once"


def test_every_kernel_compiles_and_does_not_spill() -> None:
    """The interpreter takes more than the compiler does; Triton compiles for a GPU without one."""
    check(90, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 90, 100])
def test_all_served_shapes_compile_on_all_chips(chip: int) -> None:
    check(chip)


def test_readme_has_the_table_of_the_kept_file() -> None:
    from tests.support.compiled import KEPT, README, in_readme

    assert README.read_text() == in_readme(README.read_text(), json.loads(KEPT.read_text()))


def test_spill_is_found_by_the_check() -> None:
    from tests.support import compiled

    variant = next(iter(compiled.variants(lambda: compiled.filters("cp", 8, 8)).values()))
    squeezed = replace(variant, options={**variant.options, "maxnreg": 24})
    assert compiled.row_of(variant, 90)["spilled"] == 0 < compiled.row_of(squeezed, 90)["spilled"]


BYTES, SUBWORDS = {"vocab_size": 257, "hidden_size": 128}, {"vocab_size": 128_256, "hidden_size": 4096}
# 16,040 columns a rank, no multiple of 16
DIVIDED = {"vocab_size": 128_264, "hidden_size": 4096, "expander_rank": 64}
HEADS: dict[str, dict[str, int]] = {  # the kind of head, and its sizes and options
    "linear": BYTES,
    "linear, tokens": {**BYTES, "token_rank": 32},
    "shared": {**SUBWORDS, "expander_rank": 64},
    "shared, tokens": {**SUBWORDS, "expander_rank": 64, "token_rank": 32},
    "shared, low rank, tokens": {**SUBWORDS, "expander_rank": 64, "token_rank": 32, "component_rank": 16},
    "shared, 8 ranks": DIVIDED,
    "shared, 8 ranks, tokens": {**DIVIDED, "token_rank": 32},
    "shared, 8 ranks, low rank": {**DIVIDED, "component_rank": 16},
}


@pytest.mark.parametrize("name", [*HEADS, "coupling"])
def test_nothing_is_compiled_while_serving(name: str) -> None:
    """What the speculator or the verifier launches before the first request, then batches up to 1,024 requests."""
    warm, new = forks.call("v1", "tests.kernels.test_compiled:_count", name)
    assert warm and not new


def _count(name: str) -> tuple[list[str], list[str]]:
    """Variants that the warm-up compiles, and those that serving needs next to them."""
    from tests.support.compiled import META, variants

    start, serve = _coupling() if name == "coupling" else _drafting(name)
    torch.Tensor.is_cuda = True  # for good: this process ends with the answer
    torch.Tensor.tolist = lambda tensor: torch.empty_like(tensor, device="cpu").zero_().numpy().tolist()
    # tensors of the GPU are made on META
    torch.arange, torch.tensor = (_on(META, function) for function in (torch.arange, torch.tensor))
    with torch.inference_mode():
        warm, served = variants(start), variants(serve)
    return [str(key) for key in warm], [str(key) for key in served.keys() - warm.keys()]


def _on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **given: function(*arguments, **given | {"device": device})


def _coupling() -> tuple[Callable[[], None], Callable[[], None]]:
    from tests.support.compiled import INT, LONG, META, empty
    from vllm_mtpc.kernels import couple

    def serve(width: int = 8) -> None:
        for requests in (*range(1, 40), 257, 1024):
            rows, begins = empty(requests * width, dtype=LONG), empty(requests + 1, dtype=INT)
            kept, count = couple.accept(rows, rows.int(), begins, width)
            couple.accept(rows, rows.int(), begins, width, (count > 0, kept, count))

    return partial(couple.warm_up, 8, META), serve


def _drafting(name: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """The warm-up of a speculator on the meta device, and drafting of all batches that it divides otherwise."""
    from tests.support.compiled import HALF, LONG, META, last_of, vllms_gumbel
    from vllm_mtpc.config.mtpc_config import HeadConfig
    from vllm_mtpc.heads import build_head
    from vllm_mtpc.plan.draft_schedule import expand_schedule
    from vllm_mtpc.proposers.options.draft_memory import gathered_rows, rows_at_once
    from vllm_mtpc.proposers.v2 import speculator as module
    from vllm_mtpc.proposers.worker import grammar_masks

    sizes, zeros = HEADS[name], partial(torch.zeros, device=META)
    target = {"model_type": "llama", "vocab_size": sizes["vocab_size"], "hidden_size": sizes["hidden_size"]}
    given = {"head": name.partition(",")[0], "circuit": "btree", "window": 8, "num_components": 8}
    given |= {key: value for key, value in sizes.items() if key not in target}
    with META:
        head = build_head(HeadConfig.create(target=target, verifier="../target", **given)).bfloat16()
    if head.needs_lm_head:
        shard = last_of(8, sizes["vocab_size"]) if "ranks" in name else None
        width = shard.rows if shard else sizes["vocab_size"]
        head.bind_lm_head(lambda states: states.new_empty(*states.shape[:-1], width), shard)

    gumbel = vllms_gumbel()
    module.gumbel_noised_argmax = gumbel.gumbel_noised_argmax
    module.async_tensor_h2d = lambda data, *_: torch.as_tensor(data).to(META)
    served = object.__new__(module.MtpcSpeculator)
    served.max_num_reqs, served.num_speculative_steps, served.use_fp64_gumbel, served.is_drawn = 1024, 7, False, True
    served.model, served.device = head, META
    served.drafter = served._make_drafter(head)
    served.drafts_by_batch = expand_schedule([(1, 32, 7), (33, 256, 3), (257, 1024, 1)], 1024, 7)
    in_blocks = not served.drafter.one_launch
    served.rows_at_once = rows_at_once(head, served.drafts_by_batch, 7, HALF, in_blocks=in_blocks)
    served.gathered_rows = gathered_rows(head, 7, HALF, True)
    served.gathering = (whole := head.undivided()), served._make_drafter(whole)
    served.device = torch.device("cuda")
    served.idx_mapping, served.seeds, served.first_tokens, served.noise_pos = zeros(4, 1024, dtype=LONG)
    served.temperature, served.draft_token_confidence_probs = zeros(1024), zeros(1024, 7)
    served.hidden_states = zeros(1024, sizes["hidden_size"], dtype=HALF)
    served.draft_tokens = zeros(1024, 7, dtype=LONG)
    served.draft_logits = zeros(1024, 7, sizes["vocab_size"], dtype=HALF)
    bits = torch.zeros(1024, -(-sizes["vocab_size"] // 32), dtype=torch.int32)
    follower = grammar_masks.Follower(Mock(is_terminated=lambda: False))
    served.structured = SimpleNamespace(
        masks=lambda names, slots, counts, drafts: (
            grammar_masks.Masks(bits, dict.fromkeys(range(len(names)), follower)),
            drafts.tolist(),
        )
    )
    batch = SimpleNamespace(req_ids=["r"] * 1024)
    # Triton specialises 1 and multiples of 16: of batches, and of the part of one that is drafted last
    steps = set(served.rows_at_once.values())
    last = {end + rest for step in steps for end in range(step, 1024, step) for rest in (0, 1, 2, 16)}

    def serve() -> None:
        for num_reqs in {*range(1, 65), 256, 257, *last, 1024} & {*range(1025)}:
            served._generate_draft(num_reqs, served.drafts_by_batch[num_reqs])
        for num_reqs in (1, 2, 3, 16, 40):  # under a grammar
            served._generate_masked_draft(batch, [*range(num_reqs)], served.noise_pos, served.drafts_by_batch[num_reqs])

    return served._warm_up, serve
