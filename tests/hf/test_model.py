"""Targets with code in their repository are refused, and the code is not run."""

from __future__ import annotations

import json

import pytest

from vllm_mtpc.errors import UsageError
from vllm_mtpc.hf import load_target
from vllm_mtpc.hf.model import target_config, target_tokenizer, tokenizer_if_any


@pytest.fixture
def with_code(tmp_path):
    """A model whose config and tokenizer are classes in its repository, which leave a file when they are run."""
    config = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    return tmp_path


def test_code_of_a_repository_is_neither_run_nor_asked_for(with_code, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    for read in (load_target, target_config, target_tokenizer):
        with pytest.raises(UsageError, match="Python code of its repository, which is never run here") as caught:
            read(str(with_code))
        assert "\n" not in str(caught.value)
    assert tokenizer_if_any(with_code) is None
    assert not (with_code / "was_run").exists()
