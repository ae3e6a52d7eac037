"""Targets with code in their repository are refused, and the code is not run."""

from __future__ import annotations

import json

import pytest

from vllm_mtpc.errors import UsageError
from vllm_mtpc.hf import load_target
from vllm_mtpc.hf.model import target_config, target_tokenizer, tokenizer_if_any


def test_code_of_a_repository_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    """Config and tokenizer are classes in the repository, which leave a file when they are run."""
    config = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    for read in (load_target, target_config, target_tokenizer):
        with pytest.raises(UsageError, match="Python code of its repository, which is never run here") as caught:
            read(str(tmp_path))
        assert "\n" not in str(caught.value)
    assert tokenizer_if_any(tmp_path) is None
    assert not (tmp_path / "was_run").exists()
