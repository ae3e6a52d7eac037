"""Numbers of README.md, docs and RESULTS.md are those of their files, and none is written by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import numbers
from benchmarks.numbers import BLOCK, PAGES, VALUE

ROOT = Path(__file__).parents[2]
CHECKED = [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/PAPERS.md", "kernels/README.md"]
WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|twelve|fifteen|twenty|thirty|forty|fifty|sixty|hundred"
UNITS = (
    r"s|ms|us|ns|(?:milli)?seconds?|minutes?|hours?|x|%|per ?cent|times|[KMG]i?B(?:/s)?|(?:tok|tokens|requests)/s"
    r"|tokens/step|bits"
)
MEASURED = re.compile(
    rf"\d\s?±\s?\d|(?<![\w.])(?:\d[\d,.]*[\s-]?|(?i:{WORDS}|half an?|an?(?= (?:minute|hour)))[\s-])(?:{UNITS})(?![\w/])"
    r"|\b(?i:twice|thrice|(?:double|triple|quadruple|halve)[sd]?|half|quarter|an? (?:third|fifth|tenth)|\w+fold)\b"
    r"|[\d,]+ of [\d,]+\b|\d\.\d+ / \d+\.\d+\b|\d\.\d+ (?:and|or) \d+\.\d+ tokens/step"
)
GENERATED = [
    re.compile(marker, re.DOTALL)
    for marker in (
        "```.*?```",
        r"<!-- (mtpc|ptp): written.*?<!-- \1: end[^>]*-->",  # see test_paper.py
        "<!-- results -->.*?<!-- end of the results -->",  # see test_results.py
    )
]
# Settings, limits, goals, what a paper reports, and what is computed from shapes: phrases by page.
NOT_MEASURED = {
    "benchmarks/RESULTS.md": "at most 8 minutes; at most 3 % of the step",
    "docs/choosing-a-head.md": "covers 99 % of the data",
    "docs/index.md": "once a minute; twice, with a circuit",
    "docs/internals.md": """32 KiB per token; 1 GiB for the window; 1.06 GiB at 2,048; 2.00 GiB at 32,768 (17 GiB; above
        16 MiB (GPU: 64 MiB""",
    "docs/operations.md": """every ten seconds; Drafts of the last 60 s: 2.31 tokens/step; 256 KiB for JSON; 8 MiB for a
        safetensors; at most 32 KiB; `schedule 100%`""",
    "docs/performance.md": "fifteen minutes of; goal, 3 %",
    "docs/ptp.md": "the paper's 1.13x",
    "docs/serving.md": """below 1.5 %; cost 0.8 %; for the device twice; | 39 MiB |; 1,754 MiB are; | 1,762 MiB |;
        | 1,018 MiB |; 1 GiB of logits""",
    "docs/training.md": """a fifth of them greedy; up to 8 GiB of; files of 512 MiB; half of the memory; a tenth of KL;
        (default: 1 GiB); at most a quarter, then down to a tenth; quarter of the training time; half of it for; 0.66
        MB at V; 8.2 MB at V; below 1 GiB; `, 1 GiB); twice with gradients; 40 % of 989; 17 % of 67; 60 % of; 1 to 7 %
        of; every 15 s; covers 99 % of the data""",
    "docs/your-model.md": "| 0.5 MB |; | 8.2 MB |; | 32.8 MB |; | 38.9 MB |",  # see test_site.py
    "kernels/README.md": "within 99 KiB",
}
PHRASES = {page: [" ".join(one.split()) for one in text.split(";")] for page, text in NOT_MEASURED.items()}


def without_generated(text: str) -> str:
    for generated in (*GENERATED, BLOCK, VALUE):
        text = generated.sub("", text)
    return with_units(text)


def with_units(text: str) -> str:
    """Return a text with the unit of a column of a table after each of its numbers."""
    lines: list[str] = []
    units: list[str] = []
    for line in text.splitlines():
        cells = line.split("|")
        if line.startswith("|-") or line.startswith("| -"):
            found = [re.search(rf"(?:^|[ (])({UNITS})\)?$", cell.strip()) for cell in lines[-1].split("|")]
            units = [one[1] if one else "" for one in found]
        elif not line.startswith("|"):
            units = []
        for index, unit in enumerate(units):
            if unit and re.search(r"\d\s*$", cells[index]):
                cells[index] = f"{cells[index].rstrip()} {unit} "
        lines.append("|".join(cells))
    return "\n".join(lines)


def by_hand(page: str, text: str) -> list[str]:
    """Return the paragraphs, points and rows of a page with a measured number that comes from no file."""
    text = without_generated(text)
    for phrase in PHRASES.get(page, ()):
        text = re.sub(r"\s+".join(map(re.escape, phrase.split())), "", text)
    return [part for part in re.split(r"\n\n|\n(?=[*|])", text) if MEASURED.search(part)]


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_their_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert numbers.fill(text) == text, "type: python -m benchmarks.numbers"
    marked = len(BLOCK.findall(text)) + len(VALUE.findall(text))
    assert text.count("<!-- end -->") == marked, "a marker is not as benchmarks/numbers.py says"


@pytest.mark.parametrize("page", CHECKED)
def test_no_measured_number_is_written_by_hand(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not by_hand(page, text), "give the file of the number, as benchmarks/numbers.py says"
    words = " ".join(without_generated(text).split())
    assert not [phrase for phrase in PHRASES.get(page, ()) if phrase not in words], "remove it from NOT_MEASURED"


@pytest.mark.parametrize(
    "falsified", ["after\n230 s.", "| a | s |\n|---|---|\n| b | 230 |", "Drafts triple it.", "of 3.2 / 4.6"]
)
def test_measured_number_in_a_sentence_is_found(falsified: str) -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert by_hand("docs/performance.md", f"{text}\n\n{falsified}\n")
