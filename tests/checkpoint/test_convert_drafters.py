"""`vllm-mtpc convert` of DFlash, DSpark and EAGLE-3 drafters: a head that names the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.conftest import convert, convert_refusal, converted_from
from tests.support import drafters
from tests.support.hosted import make_eagle3
from tests.support.models import make_target
from vllm_mtpc.checkpoint import check_tensors, load_head

torch.set_num_threads(1)
VOCAB = 48


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("drafters")
    return folder, make_target(folder / "target", VOCAB, seed=0, layers=4)


def edit(source: Path, **changes: Any) -> Path:
    values = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(values))
    return source


@pytest.mark.parametrize("layout", drafters.LAYOUTS)
def test_head_names_the_checkpoint_and_copies_the_markov_head(tmp_path, place, layout):
    kind, (folder, target) = layout.split()[1], place
    source, out = drafters.make(tmp_path / "source", layout, target), tmp_path / "head"
    config, head = load_head(convert(source, folder / "target", out=out))
    check_tensors(out, config)
    assert (config.circuit.kind, config.num_components, config.leaves.kind) == ("ff", 1, "lm_head")
    assert (config.hosted.method, config.hosted.model) == (kind, "../source")
    assert config.hosted.place(out) == str(source.resolve())
    assert config.window == drafters.BLOCK + (kind == "dspark")
    assert len(list(head.parameters())) == 2 * (kind == "dspark")  # it drafts what the drafter does
    assert converted_from(out) == {"from": "source", "drafter": kind}
    if kind == "dspark":
        w1, w2 = (load_file(source / "model.safetensors")[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        assert torch.equal(head.leaves.token_source, w1)
        assert all(torch.equal(part, w2.T) for part in head.leaves.token_target)


@pytest.mark.parametrize(
    ("layout", "changes", "window", "drafts"),
    [
        ("speculators dspark", {"sample_from_anchor": False}, 4, 3),
        ("original dspark", {"sample_from_anchor": False}, 4, 3),
        ("original dspark", {"block_size": 7}, 8, 7),
        ("speculators dflash", {"block_size": 7}, 7, 3),  # the number of drafts that its config proposes
    ],
)
def test_settings_decide_the_block(tmp_path, place, layout, changes, window, drafts):
    source = edit(drafters.make(tmp_path / "source", layout, place[1]), **changes)
    config, _ = load_head(convert(source, place[0] / "target", out=tmp_path / "head"))
    assert (config.window, config.num_speculative_tokens) == (window, drafts)


def test_eagle3_drafts_one_token(tmp_path, place):
    make_eagle3(tmp_path / "source", place[1])
    config, _ = load_head(convert(tmp_path / "source", place[0] / "target", out=tmp_path / "head"))
    assert (config.hosted.method, config.window) == ("eagle3", 2)


@pytest.mark.parametrize("changes", [{"architectures": ["LlamaForCausalLM"]}, {"block_size": 1}])
def test_other_checkpoint_is_refused(tmp_path, place, changes, capsys):
    source = edit(drafters.make(tmp_path / "source", "original dflash", place[1]), **changes)
    text = convert_refusal(source, place[0] / "target", capsys)
    assert "allowed: DFlash and DSpark with a block of two or more, EAGLE-3; name another drafter" in text
