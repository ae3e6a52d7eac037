"""What vLLM says of a target and a `speculative_config` in this process; nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.peers import change, make_mimo
from vllm_mtpc import demo
from vllm_mtpc.engine.speculation import Speculation
from vllm_mtpc.errors import UsageError


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo")
    make_mimo(folder)
    return folder


def of(model: Path, **more: Any) -> Speculation:
    return Speculation({"model": str(model), "dtype": "float32", **more})


def test_targets_with_mtp_layers_are_known_by_their_config(mimo: Path) -> None:
    assert of(mimo).mtp_layers() == 1 and of(demo.path("target")).mtp_layers() == 0
    assert of(mimo).problem({"method": "mtp", "num_speculative_tokens": 1}) is None
    assert of(demo.path("target")).problem({"method": "mtp", "num_speculative_tokens": 1})


def test_a_config_without_its_layers(mimo: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((mimo / "config.json").read_text())
    change(tmp_path, num_nextn_predict_layers=0)
    assert of(tmp_path, skip_tokenizer_init=True).mtp_layers() == 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"method": "eagel", "model": "m"}, "method"),
        ({"method": "ngram", "num_tokens": 3}, "unknown key 'num_tokens'; allowed: "),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "eagle", "model": "/no/such/draft", "num_speculative_tokens": 3}, "/no/such/draft"),
    ],
)
def test_what_vllm_refuses_is_one_line(given: dict[str, Any], wanted: str) -> None:
    problem = of(demo.path("target")).problem(given)
    assert problem and wanted in problem and "\n" not in problem


def test_a_target_that_vllm_cannot_read() -> None:
    with pytest.raises(UsageError, match="target /no/such/target: vLLM cannot read it"):
        of(Path("/no/such/target")).mtp_layers()
