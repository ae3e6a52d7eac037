"""The papers' tables: the document shows the result files, and what was measured is what the tables name."""

from __future__ import annotations

import pytest
import torch

from benchmarks.paper import __main__ as command
from benchmarks.paper import candidates
from benchmarks.paper.candidates import Written
from benchmarks.paper.findings import Claim, Difference, claims
from tests.support.distribution_cases import Setting, exact_distribution, is_distributed
from tests.support.tiny import llama_target
from tests.support.tiny_ptp import VARIANTS, oracle, random_student
from vllm_mtpc.eval.text import Sampling

V, LENGTH, TEXTS = 3, 3, 4000
PROMPT = torch.tensor([1, 2])


@pytest.mark.parametrize("file", command.DOCUMENTS, ids=lambda file: file.name)
def test_document_is_that_of_the_result_files_and_the_published_numbers(file):
    written = file.read_text(encoding="utf-8")
    assert command.DOCUMENTS[file](command.TABLES, written) == written, "type: python -m benchmarks.paper --write"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([(0.3, 0.1), (0.5, 0.2)], "holds"),
        ([(0.3, 0.1), (0.1, 0.1)], "within noise"),
        ([(0.3, 0.1), (-0.3, 0.1)], "does not hold"),
        ([(0.3, None), (0.1, 0.1)], "true of these rows"),
        ([(0.3, None), (-0.1, 0.1)], "not true of these rows"),
        ([], "not measured"),
    ],
)
def test_verdict_follows_from_the_errors(differences, verdict):
    assert Claim("a", [Difference(*one) for one in differences]).verdict == verdict


def test_students_are_compared_by_the_seeds_that_both_have() -> None:
    """Seeds differ by 1, the students by 0.1 with each seed: errors of independent rows would hide the difference."""
    cells = {"window": 8, "variant": "o-ptp", "standard_error": 0.6, "of_texts": 0.003}
    by_seed = {2: {0: 1.0, 1: 2.0, 2: 9.0}, 4: {0: 1.11, 1: 2.09}}
    rows = [{**cells, "n": n, "tokens_per_step": 1.5, "by_seed": by_seed[n]} for n in (2, 4)]
    assert "**holds** (+0.100 ± 0.011)" in claims("ptp-table-8", rows)[0].line()
    del rows[1]["by_seed"][1]
    assert "**within noise** (+0.000 ± 0.849)" in claims("ptp-table-8", rows)[0].line()


@pytest.mark.parametrize("variant", VARIANTS)
def test_choosing_candidates_by_u_does_not_bias_the_text_and_by_acceptance_does(variant, monkeypatch):
    """The injected choice is the candidate with most accepted drafts."""
    target = llama_target(vocab_size=V)
    student = random_student(target, variant, window=4)
    distribution = exact_distribution(target.model, PROMPT.tolist(), LENGTH, Setting())
    for is_kept in (True, False):
        if not is_kept:
            monkeypatch.setattr(candidates, "choose", lambda off, accepted: accepted.argmax(1))
        found = Written(student, [PROMPT] * TEXTS, 6, LENGTH, Sampling(1.0), seed=1).run()
        assert is_distributed(found.tokens[:, 2 : 2 + LENGTH].tolist(), distribution, V) == is_kept


def test_kept_candidate_has_more_accepted_drafts_than_the_mean(monkeypatch):
    """Of a student that is wrong near the edges of intervals: it picks at temperature 1, the target at 0.7.

    The seed is fixed. The gain is about 0.5 drafts per step; the worst candidate's is about -0.4.
    """
    gains, choose = [], candidates.choose

    def noting(off: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        best = choose(off, accepted)
        gains.append(accepted[torch.arange(len(best)), best] - accepted.double().mean(1))
        return best

    monkeypatch.setattr(candidates, "choose", noting)
    Written(oracle("o-ptp"), [PROMPT] * 8, 4, 10, Sampling(0.7), seed=1).run()
    assert torch.cat(gains).mean() > 0.2
