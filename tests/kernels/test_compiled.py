"""Every kernel compiled for GPUs that are not there; nothing is compiled once requests are served."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import forks

FOLDERS = (forks.ROOT / "kernels", forks.ROOT / "proposers")
# One of each kernel, at the sizes with most in registers; the other circuits are the same code with a smaller stack.
QUICK = (
    *("demo btree, float64", "EvaByte btree, K=2", "EvaByte btree, float32", "Llama btree, K=2", "Qwen btree, K=2"),
    *("demo btree, token 32", "EvaByte btree, token 64, float32", "Qwen btree, token 64", "Qwen btree, 2 ranks"),
    *("EvaByte B=64", "training btree n=16 r=32", "training bfloat16", "PTP V=128256", "rows"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(chip: int, names: tuple[str, ...] = ("",)) -> None:
    from tests.support import compiled

    rows = []
    for row in compiled.rows(chip, names):
        compiled.show(row)
        rows.append(row)
    assert {row["kernel"] for row in rows} == launched()
    assert not [row for row in rows if row["spilled"]]
    assert not [row for row in rows if row["shared"] > compiled.SHARED]


def launched() -> set[str]:
    """Names of the kernels that our sources launch."""
    text = "\n".join(file.read_text(encoding="utf-8") for folder in FOLDERS for file in folder.rglob("*.py"))
    kernels = set(re.findall(r"@triton\.jit(?:\([^)]*\))?\s+def (\w+)", text))
    return kernels & set(re.findall(r"\b(\w+)\[\(", text))


def test_every_kernel_compiles_and_does_not_spill() -> None:
    """The interpreter takes more than the compiler does; Triton compiles for a GPU without one."""
    check(90, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 90, 100])
def test_all_served_shapes_compile_on_all_chips(chip: int) -> None:
    check(chip)


def test_spill_is_found_by_the_check() -> None:
    from tests.support import compiled

    variant = next(iter(compiled.variants(lambda: compiled.filters("cp", 8, 8)).values()))
    squeezed = replace(variant, options={**variant.options, "maxnreg": 24})
    assert compiled.row_of(variant, 90)["spilled"] == 0 < compiled.row_of(squeezed, 90)["spilled"]


SCHEDULE = [(1, 32, 7), (33, 256, 3), (257, 1024, 1)]
BYTES, SUBWORDS = {"vocab_size": 257, "hidden_size": 128}, {"vocab_size": 128_256, "hidden_size": 4096}
HEADS: dict[str, dict[str, int]] = {  # the kind of head, and its sizes and options
    "linear": BYTES,
    "mlp": {**BYTES, "expander_layers": 1},
    "linear, tokens": {**BYTES, "token_rank": 32},
    "shared": {**SUBWORDS, "expander_rank": 64},
    "shared, tokens": {**SUBWORDS, "expander_rank": 64, "token_rank": 32},
    "shared, low rank, tokens": {**SUBWORDS, "expander_rank": 64, "token_rank": 32, "component_rank": 16},
    # 16,040 columns a rank, no multiple of 16
    "shared, 8 ranks": {**SUBWORDS, "vocab_size": 128_264, "expander_rank": 64},
    "shared, 8 ranks, tokens": {**SUBWORDS, "vocab_size": 128_264, "expander_rank": 64, "token_rank": 32},
}


@pytest.mark.parametrize("name", list(HEADS))
def test_nothing_is_compiled_while_serving(name: str) -> None:
    """The speculator's own warm-up, then every batch up to 1,024 with its drafts; large ones are drafted in parts."""
    warm, new = forks.call("v1", "tests.kernels.test_compiled:_count", name)
    print(f"{name}: {len(warm)} variants compiled at the start")
    assert warm and not new


def _count(name: str) -> tuple[list[str], list[str]]:
    """Variants that the warm-up compiles, and those that batches of 1 .. 1,024 need next to them."""
    from tests.support.compiled import META, last_of, variants, vllms_gumbel
    from vllm_mtpc.config.mtpc_config import HeadConfig
    from vllm_mtpc.heads import build_head
    from vllm_mtpc.plan.draft_schedule import expand_schedule
    from vllm_mtpc.proposers.config.draft_memory import rows_at_once
    from vllm_mtpc.proposers.heads.grammar_masks import Follower, Masks
    from vllm_mtpc.proposers.v2 import speculator as module

    sizes = HEADS[name]
    target = {"model_type": "llama", **{key: sizes[key] for key in ("vocab_size", "hidden_size")}}
    options = {key: value for key, value in sizes.items() if key not in target}
    config = HeadConfig.create(
        circuit="btree",
        window=8,
        num_components=8,
        target=target,
        verifier="../target",
        head=name.partition(",")[0],
        **options,
    )
    with META:
        head = build_head(config).bfloat16()
    if head.needs_lm_head:
        shard = last_of(8, sizes["vocab_size"]) if "ranks" in name else None
        width = shard.rows if shard else sizes["vocab_size"]
        head.bind_lm_head(lambda states: states.new_empty(*states.shape[:-1], width), shard)

    gumbel = vllms_gumbel()
    module.gumbel_noised_argmax, module.gumbel_sample = gumbel.gumbel_noised_argmax, gumbel.gumbel_sample
    served = object.__new__(module.MtpcSpeculator)
    served.max_num_reqs, served.num_speculative_steps, served.use_fp64_gumbel = 1024, 7, False
    served.model, served.device = head, META
    served.drafter = served._make_drafter(head)
    served.drafts_by_batch = expand_schedule(SCHEDULE, 1024, 7)
    served.rows_at_once = rows_at_once(head, served.drafts_by_batch, 7, torch.bfloat16)
    served.idx_mapping, served.seeds, served.first_tokens, served.noise_pos = torch.zeros(
        4, 1024, dtype=torch.int64, device=META
    )
    served.temperature = torch.zeros(1024, device=META)
    served.hidden_states = torch.zeros(1024, sizes["hidden_size"], dtype=torch.bfloat16, device=META)
    served.draft_tokens = torch.zeros(1024, 7, dtype=torch.int64, device=META)
    served.draft_token_confidence_probs = torch.zeros(1024, 7, device=META)
    served.is_drawn = True
    served.draft_logits = torch.zeros(1024, 7, sizes["vocab_size"], dtype=torch.bfloat16, device=META)

    served.step_cols = torch.arange(7, dtype=torch.int32, device=META)
    allowing = SimpleNamespace(
        fill_bitmask=lambda bits, row: None,
        accept_tokens=lambda name, tokens: True,
        is_terminated=lambda: False,
        rollback=lambda count: None,
    )
    bits = torch.zeros(1024, -(-sizes["vocab_size"] // 32), dtype=torch.int32)

    def masks(names: list[str], *_: Any) -> Masks:
        return Masks(bits, {row: Follower(allowing) for row in range(len(names))})

    served.structured = SimpleNamespace(masks=masks)
    batch = SimpleNamespace(req_ids=["r"] * 1024)

    def serve(num_reqs: int) -> None:
        served._generate_draft(num_reqs, served.drafts_by_batch[num_reqs])
        if num_reqs in (1, 2, 3, 16, 40):  # under a grammar
            served._generate_masked_draft(batch, [*range(num_reqs)], served.noise_pos, served.drafts_by_batch[num_reqs])

    served.device = torch.device("cuda")
    torch.Tensor.is_cuda = True  # for good: this process ends with the answer
    torch.Tensor.tolist = lambda tensor: [0] * len(tensor)
    arange, tensor = torch.arange, torch.tensor  # tensors of the GPU are made on META
    torch.arange = lambda *sizes, device=None, **given: arange(*sizes, device=META, **given)
    torch.tensor = lambda data, device=None, **given: tensor(data, device=META, **given)
    with torch.inference_mode():
        warm = variants(served._warm_up)
        new = variants(lambda: [serve(num_reqs) for num_reqs in range(1, 1025)])
    return [str(key) for key in warm], [str(key) for key in new.keys() - warm.keys()]


def test_coupling_is_compiled_at_the_start() -> None:
    warm, new = forks.call("v1", "tests.kernels.test_compiled:_count_coupled")
    assert len(warm) == 2 and not new


def _count_coupled() -> tuple[list[str], list[str]]:
    from tests.support.compiled import META, variants
    from vllm_mtpc.kernels import couple

    torch.Tensor.is_cuda = True  # for good: this process ends with the answer

    def serve(width: int = 8) -> None:
        for requests in (*range(1, 40), 257, 1024):
            rows = torch.zeros(requests * width, dtype=torch.int64, device=META)
            begins = torch.zeros(requests + 1, dtype=torch.int32, device=META)
            kept, count = couple.accept(rows, rows.int(), begins, width)
            couple.accept(rows, rows.int(), begins, width, (count > 0, kept, count))

    warm = variants(lambda: couple.warm_up(8, META))
    return list(map(str, warm)), [str(key) for key in variants(serve).keys() - warm.keys()]
