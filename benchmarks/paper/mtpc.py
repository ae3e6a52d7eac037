"""Tables and figures of the MtPC paper, on the demo target of 0.2: heads trained with the paper's loss.

Tables 1 and 2 were served by vLLM as the paper counts (Appendix F): one request at a time, temperature 1, answers that
do not end by themselves, all drafts of a window in every step. *Expected*: tokens/step by the evaluator at the end of
training, the target's own token included; the paper's mean accepted counts drafts alone, and its window has one draft
more. The programs that measured them are those of each result's commit.
"""

from __future__ import annotations

from benchmarks.paper.frame import Table

STEPS, CONTINUED, WINDOWS = 250, 100, 128
SIZE = (
    f"The demo target of 0.2 (3.7M parameters, bytes), {STEPS} steps of {WINDOWS} windows of its text, the paper's "
    "loss; served by vLLM in float32 on two CPU cores, median of two rounds of 8 answers of 96 tokens. The paper: "
    "EvaByte 6.5B, 900 steps of 2.1M tokens of Tülu 3, one L40S."
)
TRAINED = {"bits": "bits/byte", "expected": "expected", "standard_error": "± s.e."}
SERVED = {"tokens_per_step": "served", "step_ms": "ms per step", "tokens_per_second": "tok/s"}


TABLES: dict[str, Table] = {
    "mtpc-table-1": Table(
        "more components",
        {"circuit": "circuit", "r": "r", **TRAINED, **SERVED, "unverified": "tok/s unverified"},
        None,
        SIZE + " Unverified: n tokens in every step.",
        "Served tokens/step, of 16 answers, fall from 64 to 128 components. Heads of 250 steps that draft in every "
        "step are slower than plain vLLM here: a pass of this target is cheap compared with the rest of a step. The "
        "[demo](../docs/performance.md#demo-target) has heads trained longer.",
    ),
    "mtpc-table-2": Table(
        "circuits and windows",
        {
            "n": "n",
            "circuit": "circuit",
            "r": "r",
            **TRAINED,
            **SERVED,
            "draft_share": "drafting",
            "speedup": "speed-up",
        },
        None,
        SIZE + " Drafting: its share of a step.",
        "Served, of 16 answers, BTree has fewer tokens/step than CP at n = 8, and HMM at n = 16. On two cores sixteen "
        "rows cost more than they bring. The remark on speed above applies here.",
    ),
    "mtpc-table-3": Table(
        "LoRA on the last layers",
        {"n": "n", "circuit": "circuit", "layers": "LoRA layers", **TRAINED},
        None,
        f"Heads of table 2, {CONTINUED} steps more with adapters of rank 16 on the last layers of 8, or without. Heads "
        "after such layers are served by Model Runner V2, whose kernels are interpreted here: their speed means "
        "nothing. k layers are k / 8 of a pass of this target, k / 32 of EvaByte's.",
        "The paper: BTree at n = 16 gains from 6.86 to 7.58 tokens.",
    ),
    "mtpc-figure-1": Table(
        "tokens/step against the time of a step",
        {"n": "n", "circuit": "circuit", "r": "r", **SERVED},
        None,
        "Rows of tables 1 and 2, measured one after the other: heads of both are shown twice, and plain vLLM is that "
        "of table 1. Lines: equal tok/s.",
        "Unlike in the paper, plain vLLM has the most tok/s: a pass of this target is cheap compared with drafts.",
    ),
    "mtpc-appendix-e": Table(
        "how an HMM is parameterised, and how it starts",
        {"n": "n", "what": "", **TRAINED},
        None,
        f"r = 32, {STEPS} steps of {WINDOWS} windows, the demo target.",
        "",
    ),
    "mtpc-served-and-expected": Table(
        "on the same texts",
        {"head": "head", "t": "T", "predicted": "expected", "standard_error": "± s.e.", "served": "served"},
        None,
        "Tables 1 and 2 serve 16 answers of 96 tokens to openings of functions; their expected values are of 128 "
        "continuations of other text. Here both are of the same prompts: `vllm-mtpc doctor` of the heads packaged with "
        "0.2, 32 prompts, 128 tokens, every draft in every step.",
        "In tables 1 and 2 the texts differ, so their served and expected values are not comparable.",
    ),
    "mtpc-tables-4-to-6": Table(
        "a second device",
        {},
        None,
        "They are tables 1 to 3 on a second GPU. Here tables 1 to 3 have run on a CPU alone.",
        "",
    ),
}
