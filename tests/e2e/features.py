"""The feature matrix: what works with drafts on, and the test that shows it. `docs/features.md` is written from here.

    python -m tests.e2e.features --write docs/features.md

Every cell that claims something names a test; `tests/test_feature_matrix.py` checks that each of them exists and that
the page is what would be written.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = ("mtpc on V1", "mtpc on V2", "ptp on V2")
TITLES = {"exact": "exact", "law": "law", "refused": "refused", "off": "turned off", "untested": "not tested"}
HEADER = """# Features

What a request or an engine may ask for with drafts on. Written by `python -m tests.e2e.features --write
docs/features.md` from the table the tests are checked against; not to be edited.

* **exact**: a test compares tokens (and logprobs) with plain vLLM's, greedy or sharpened to be, drafts on and accepted.
  For `ptp` also at any temperature: with the text its sampler gives without drafts.
* **law**: a test compares the law of sampled text with enumeration, and finds a planted fault.
* **refused**: a test reads the one-line message.
* **turned off** for such an engine; a test looks. **not tested**: and why.

V1 and V2 are vLLM's model runners; V2 ran in Triton's interpreter on a CPU. Numbers name the tests below.
"""


@dataclass(frozen=True)
class Cell:
    """What holds in one column; `tests`: "file::function" below tests/, `why`: of what is not tested or not all."""

    kind: str
    tests: tuple[str, ...] = ()
    why: str = ""


def exact(*tests: str, why: str = "") -> Cell:
    return Cell("exact", tests, why)


def law(*tests: str, why: str = "") -> Cell:
    return Cell("law", tests, why)


def refused(*tests: str, why: str = "") -> Cell:
    return Cell("refused", tests, why)


def off(*tests: str, why: str = "") -> Cell:
    return Cell("off", tests, why)


def untested(why: str) -> Cell:
    return Cell("untested", (), why)


LAW_V1 = "e2e/test_grammar_law.py::test_law_under_a_grammar_v1"
SCHEMA = "e2e/test_features.py::test_schema_output_is_valid"
MATRIX_TEST = "e2e/test_matrix.py::test_a_request_is_answered_as_without_drafts"
PTP_TEXT = "e2e/test_ptp.py::test_text_is_that_without_drafts"
SAME_EVERYWHERE = exact(MATRIX_TEST)
GREEDY = "e2e/test_greedy.py::test_greedy_equals_plain"
HAPPENED = "e2e/test_greedy.py::test_every_scenario_happened"
RANKS = "e2e/test_parallel.py::test_ranks_are_held_to_the_same_drafts"
SEEDED = "e2e/test_greedy.py::test_seeded_request_does_not_depend_on_its_batch"
NO_GPU = untested("needs a GPU")

# rows of test_matrix.ROWS, tested in one batch on every runner
BATCHED = (
    "presence penalty",
    "frequency penalty",
    "repetition penalty",
    "logprobs",
    "prompt logprobs",
    "stop_token_ids",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "JSON object",
    "regex",
    "grammar",
    "choice",
)

FEATURES: dict[str, tuple[Cell, Cell, Cell]] = {
    "temperature": (
        law("e2e/test_law.py::test_law_v1_btree", "e2e/test_law.py::test_planted_bias_is_caught"),
        law("e2e/test_law.py::test_law_v2"),
        law("e2e/test_ptp_law.py::test_law_with_and_without_drafts"),
    ),
    "top_k": (SAME_EVERYWHERE, SAME_EVERYWHERE, exact(MATRIX_TEST, PTP_TEXT)),
    "top_p": (law("e2e/test_law.py::test_law_v1_btree"), SAME_EVERYWHERE, exact(MATRIX_TEST, PTP_TEXT)),
    "min_p, logit_bias": (refused("e2e/test_matrix.py::test_refused_with_drafts", why="by vLLM, with any drafts"),) * 3,
    **{row: (SAME_EVERYWHERE,) * 3 for row in BATCHED},
    "logprobs_mode: all four": (
        exact("e2e/test_variants.py::test_every_mode_of_logprobs"),
        exact("e2e/test_variants.py::test_every_mode_of_logprobs"),
        exact("e2e/test_variants.py::test_every_mode_of_logprobs"),
    ),
    "seed: the same text in any batch": (
        exact(SEEDED, why="of one that no token budget cuts and that is not preempted"),
        exact(SEEDED, "e2e/test_limits.py::test_a_seed_leaves_the_schedule_to_others", why="as on V1"),
        exact(PTP_TEXT),
    ),
    "n > 1": (SAME_EVERYWHERE,) * 3,
    "stop strings": (
        exact(MATRIX_TEST, "e2e/test_features.py::test_stop_string_does_not_leak"),
        exact(MATRIX_TEST, "e2e/test_features.py::test_stop_string_does_not_leak"),
        SAME_EVERYWHERE,
    ),
    "ignore_eos, end of text": (exact("e2e/test_matrix.py::test_end_of_text_is_ignored_where_that_is_asked"),) * 3,
    "JSON schema": (
        exact(
            "e2e/test_features.py::test_schema_output_is_valid", "e2e/test_grammar.py::test_greedy_text_is_plain_vllms"
        ),
        exact("e2e/test_features.py::test_schema_output_is_valid"),
        exact("e2e/test_ptp_features.py::test_output_under_a_grammar_is_valid"),
    ),
    "sampling under a grammar": (
        law(
            "e2e/test_grammar_law.py::test_law_under_a_grammar_v1",
            "e2e/test_grammar_law.py::test_planted_bias_is_caught",
        ),
        law("e2e/test_grammar_law.py::test_law_under_a_grammar_v2"),
        exact(
            "proposers/test_coupled.py::test_forbidden_drafts_are_refused_though_right",
            why="drafts have no law: the token is picked",
        ),
    ),
    "drafts masked with the grammar": (
        exact(
            "e2e/test_grammar.py::test_every_draft_is_allowed_by_the_grammar",
            "e2e/test_grammar.py::test_more_tokens_per_step",
        ),
        refused(
            "proposers/test_grammar.py::test_masks_on_v2_are_refused",
            why="grammars live on the host, drafts on the device",
        ),
        refused("proposers/test_grammar.py::test_masks_of_ptp_are_refused", why="not an option of ptp"),
    ),
    "chat, streaming, tool calls": (
        exact("e2e/test_chat.py::test_chat_and_tools"),
        exact("e2e/test_chat.py::test_chat_and_tools"),
        exact("e2e/test_chat.py::test_chat_and_tools"),
    ),
    "LoRA requests on the target": (
        exact("e2e/test_variants.py::test_lora_requests"),
        exact("e2e/test_variants.py::test_lora_requests"),
        refused("proposers/test_ptp_bad_input.py::test_lora_requests_are_refused"),
    ),
    "prefix caching": (exact(GREEDY, HAPPENED), exact(GREEDY, HAPPENED), exact(PTP_TEXT, why="with hits counted")),
    "chunked prefill": (
        exact(GREEDY, HAPPENED),
        exact(GREEDY, HAPPENED),
        exact("e2e/test_variants.py::test_a_prompt_in_pieces_before_ptp"),
    ),
    "preemption by recompute": (
        exact(GREEDY, HAPPENED),
        exact(GREEDY, HAPPENED),
        exact(PTP_TEXT, "e2e/test_ptp.py::test_requests_were_preempted_and_found_in_the_cache"),
    ),
    "asynchronous scheduling": (
        off("test_feature_matrix.py::test_v1_is_kept_synchronous", why="V1 drafts from token lists on the host"),
        exact(GREEDY, MATRIX_TEST),
        exact(PTP_TEXT, MATRIX_TEST),
    ),
    "synchronous scheduling": (
        exact(GREEDY),
        exact("e2e/test_features.py::test_stop_string_does_not_leak"),
        exact("e2e/test_ptp_features.py::test_output_under_a_grammar_is_valid"),
    ),
    "max_model_len reached": (
        exact(GREEDY, "e2e/test_limits.py::test_drafts_up_to_the_last_token"),
        exact(GREEDY),
        exact(PTP_TEXT),
    ),
    "8-bit target (int8, compressed-tensors)": (
        exact("e2e/test_variants.py::test_quantised_target"),
        exact("e2e/test_ptp_features.py::test_greedy_text_of_a_quantised_target"),
        exact("e2e/test_ptp_features.py::test_greedy_text_of_a_quantised_target"),
    ),
    "4-bit target (int4 weights, compressed-tensors)": (exact("e2e/test_variants.py::test_quantised_target"),) * 3,
    "eager": (exact(GREEDY), exact(GREEDY), exact(PTP_TEXT)),
    "torch.compile": (
        exact("e2e/test_variants.py::test_a_compiled_target", why="the draft beside it is eager"),
        untested("inductor does not run in the interpreter"),
        untested("inductor does not run in the interpreter"),
    ),
    "CUDA graphs": (NO_GPU,) * 3,
    "sleep and wake": (untested("vLLM's sleep mode needs a GPU's allocator"),) * 3,
    "tensor parallel": (
        exact(
            "e2e/test_parallel.py::test_tensor_parallel_v1", "e2e/test_parallel.py::test_divided_unembeddings", RANKS
        ),
        exact(
            "e2e/test_parallel.py::test_tensor_parallel_v2", "e2e/test_parallel.py::test_divided_unembeddings", RANKS
        ),
        exact("e2e/test_ptp_law.py::test_tensor_parallel"),
    ),
    "pipeline parallel": (
        refused("proposers/test_bad_input.py::test_pipeline_parallel_on_v1_is_refused"),
        exact("e2e/test_parallel.py::test_pipeline_parallel_v2"),
        refused("proposers/test_ptp_bad_input.py::test_pipeline_parallel_is_refused"),
    ),
    "data parallel": (exact("e2e/test_data_parallel.py::test_two_engines"),) * 3,
}


@cache
def functions(file: str) -> dict[str, bool]:
    """Test functions of a file below tests/, and whether they are slow."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: any(ast.unparse(d)[-9:] == "mark.slow" for d in node.decorator_list) for node in found}


def named() -> list[str]:
    """Every test that a cell names, once, in the order of the table."""
    return list(dict.fromkeys(test for row in FEATURES.values() for cell in row for test in cell.tests))


def page() -> str:
    """The text of docs/features.md."""
    numbers = {test: number for number, test in enumerate(named(), 1)}

    def text(cell: Cell) -> str:
        shown = " ".join(f"[{numbers[test]}]" for test in cell.tests)
        return TITLES[cell.kind] + (f" {shown}" if shown else "") + (f": {cell.why}" if cell.why else "")

    rows = [f"| {name} | {' | '.join(map(text, row))} |" for name, row in FEATURES.items()]
    table = ["| feature | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|", *rows]
    listed = []
    for test, number in numbers.items():
        file, function = test.split("::")
        slow = " (slow: `scripts/test.sh --all`)" if functions(file)[function] else ""
        listed.append(f"{number}. `tests/{file}`: `{function}`{slow}")
    return "\n".join([HEADER, *table, "", "## Tests", "", *listed, ""])


def main(arguments: list[str]) -> None:
    if len(arguments) != 2 or arguments[0] != "--write":
        sys.exit(
            f"given {' '.join(arguments) or 'nothing'}; type: python -m tests.e2e.features --write docs/features.md"
        )
    Path(arguments[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
