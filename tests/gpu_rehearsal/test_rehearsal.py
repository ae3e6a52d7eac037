"""Engines start and draft on a rehearsed GPU; injected faults are found (`tests/gpu_rehearsal`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import test_hosted
from tests.gpu_rehearsal.faults import FAULTS
from tests.gpu_rehearsal.rehearsal import Report
from tests.support import backbones
from tests.support.configs import write_head
from tests.support.models import make_ptp_head, make_target

ROOT = Path(__file__).parents[2]
# The most GPU operations of a draft outside of CUDA graphs. PTP: 4, and vLLM's own kernels for the first draft, 16 if
# requests use every sampling option, as those of the rehearsal do.
OPERATIONS = {"btree": 1, "backbone": 2, "late": 20}
SHARED = {"kind": "lm_head", "expander_rank": 8, "component_rank": 0, "token_rank": 4}
BACKBONE = {"kind": "backbone", "aux_hidden_state_layer_ids": [0, 1], **backbones.SMALL}


def rehearse(folder: Path, *arguments: str) -> dict[str, Report]:
    """Return the reports of `python -m tests.gpu_rehearsal`, by name; its output is kept for failures."""
    command = [sys.executable, "-m", "tests.gpu_rehearsal", *arguments, "--json", str(folder)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False, timeout=1800)
    return {file.stem: Report(**json.loads(file.read_text())) for file in folder.iterdir()}


def check(report: Report, drafts: bool = True) -> None:
    assert report.error is None
    assert not report.serious
    assert bool(report.drafts) == drafts


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Of a target of two layers and few graphs: half a minute for each head. The packaged heads are slow tests."""
    place = tmp_path_factory.mktemp("small")
    target = make_target(place / "target", vocab_size=257, seed=0)
    write_head(place / "btree", target.config.to_dict())
    write_head(place / "backbone", target.config.to_dict(), trunk=BACKBONE, leaves=SHARED | {"component_rank": 4})
    make_ptp_head(place / "late", target, "late", 5, late_width=12)
    (place / "reports").mkdir()
    heads = [str(place / name) for name in OPERATIONS]
    graphs = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 8, 64]}
    engine = json.dumps({"model": str(place / "target"), "compilation_config": graphs})
    return rehearse(place / "reports", *heads, "--faults", heads[0], "--engine", engine)


@pytest.mark.parametrize("head", OPERATIONS)
def test_head_starts_and_drafts(head: str, reports: dict[str, Report]) -> None:
    """No mixed devices, wrong types, waits, pageable copies, compilation, NVRTC or graphs that are kept too long."""
    check(reports[head])
    assert reports[head].most_operations == OPERATIONS[head]


@pytest.mark.parametrize(("_", "kind", "text"), FAULTS.values(), ids=FAULTS)
def test_injected_fault_is_found(_: Any, kind: str, text: str, reports: dict[str, Report]) -> None:
    found = reports["btree-faults"].serious
    assert [one for one in found if one["kind"] == kind and text in one["what"]]


PACKAGED = ("ff", "cp", "hmm", "btree", "backbone", "o-ptp", "c-ptp", "late")
MERGED = ("--spec", json.dumps({"draft_pass": "merged"}))
NIGHTLY: dict[str, tuple[str, ...]] = {
    "packaged": ("plain", *PACKAGED),
    "float32": ("btree", "backbone", "late", "--engine", json.dumps({"dtype": "float32"})),
    "merged": ("o-ptp", "late", *MERGED),
    "Triton attention": ("backbone", "late", "--engine", json.dumps({"attention_backend": "TRITON_ATTN"})),
    "two ranks": ("btree", "backbone", "late", "--ranks", "2"),
    "compiled": ("plain", "btree", "backbone", "late", "--compile"),
    "grammars": ("btree", "--spec", json.dumps({"mask_drafts": True})),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NIGHTLY)
def test_other_engines_start_and_draft(case: str, tmp_path: Path) -> None:
    found = rehearse(tmp_path, *NIGHTLY[case])
    assert {*found} == {head for head in NIGHTLY[case] if head in ("plain", *PACKAGED)}
    for head, report in found.items():
        check(report, drafts=head != "plain")


@pytest.mark.slow
def test_late_drafts_need_no_float64_numbers_of_a_vocabulary(tmp_path: Path) -> None:
    """Of 151,936 ids only the sums of blocks are float64; numbers of each id and row would be 100 MB."""
    most, window, size = 17, 5, 151_936
    make_ptp_head(tmp_path / "late", make_target(tmp_path / "target", size, seed=0), "late", window, late_width=12)
    (tmp_path / "reports").mkdir()
    engine = json.dumps({"model": str(tmp_path / "target"), "max_num_seqs": most})
    (report,) = rehearse(tmp_path / "reports", str(tmp_path / "late"), "--engine", engine).values()
    check(report)
    assert 0 < report.float64_bytes <= 8 * most * window * -(-size // 1024)


def make_folder(place: Path, name: str) -> Path:
    """A tiny target in `target`, and the head of a case."""
    if name in ("mimo", "eagle3", "speculators dflash", "speculators dspark"):
        test_hosted.make_case(place, name)
        return place / "head"
    size, layers = 128_264 if "large" in name else 48, 4 if name == "draft layers" else 2
    target = make_target(place / "target", size, seed=0, layers=layers)
    write_head(place / "head", target.config.to_dict(), **MADE[name])
    return place / "head"


# Vocabularies of many blocks: drafts, and the reduction over blocks and ranks, are other launches.
MADE: dict[str, dict[str, Any]] = {
    "draft layers": {"trunk": {"kind": "lora", "rank": 4, "alpha": 8.0}},
    "mlp": {"trunk": {"kind": "mlp"}},
    "large vocabulary": {"trunk": {"kind": "none"}, "leaves": SHARED},
    "large vocabulary, low rank": {"trunk": {"kind": "none"}, "leaves": SHARED | {"component_rank": 16}},
    "large vocabulary, mlp": {"trunk": {"kind": "mlp"}, "leaves": SHARED | {"component_rank": 16}},
}
HOSTED = ("mimo", "eagle3", "speculators dflash", "speculators dspark")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("large vocabulary, mlp", 2),  # and of low rank: every part of the others but a trunk of layers
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in (*HOSTED, *MADE)),
        *(pytest.param(f"large vocabulary{more}", 2, marks=pytest.mark.slow) for more in ("", ", low rank")),
    ],
)
def test_made_heads_start_and_draft(name: str, ranks: int, tmp_path: Path) -> None:
    """Nothing is compiled in a step, in batches of each kind for Triton: 1, multiples of 16, others."""
    head = make_folder(tmp_path, name)
    engine = {"model": str(tmp_path / "target"), "trust_remote_code": True, "max_model_len": 96, "max_num_seqs": 17}
    (tmp_path / "reports").mkdir()
    words = str(head), "--ranks", str(ranks), "--engine", json.dumps(engine)
    words += ("--spec", json.dumps({"mask_drafts": True})) if "vocabulary" in name else ()
    (report,) = rehearse(tmp_path / "reports", *words).values()
    check(report)
