"""EvaByte's tokenizer, its chat template and the longest known suffix by their definitions."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from tests.support.byte_llama_reference import LONGEST, SPECIAL, SUBWORDS, VOCAB, Reference, make_table, make_texts
from tests.support.evabyte_reference import SIZES
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.hf.model import target_tokenizer
from vllm_mtpc.models.byte_llama.config import ABSENT, ByteLlamaConfig, build_suffixes
from vllm_mtpc.models.evabyte.config import SPECIAL_TOKENS

EXPANDING = {"vocab_size": VOCAB, "expand_input_ids": True}
EXPANDING |= {"expand_input_ids_maxlen": LONGEST, "expand_input_ids_vocab_size": SUBWORDS}
CONFIG = ByteLlamaConfig(**EXPANDING)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder whose files name the original, remote code."""
    folder = tmp_path_factory.mktemp("evabyte")
    remote = {"AutoTokenizer": ["tokenization_evabyte.EvaByteTokenizer", None]}
    named = {"tokenizer_class": "EvaByteTokenizer", "auto_map": remote}
    (folder / "config.json").write_text(json.dumps(SIZES))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return target_tokenizer(folder)


def original_ids(text: str) -> list[int]:
    """The original: special tokens as they occur in the text, 64 + byte elsewhere, <bos> before."""
    ids, at = [1], 0
    while at < len(text):
        special = next((token for token in SPECIAL_TOKENS if text.startswith(token, at)), None)
        ids += [SPECIAL_TOKENS.index(special)] if special else [64 + byte for byte in text[at].encode()]
        at += len(special or " ")
    return ids


def texts() -> list[str]:
    rng = random.Random(0)
    others = ["é", "日本", "🦙", "\r\n", "  ", "<", "|>", "\u200b"]
    pieces = [*SPECIAL_TOKENS, *map(chr, range(1, 300)), *others]
    drawn = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(200)]
    return ["", " leading", "trailing ", "a<|eot_id|> b", "<bos>twice", "'s I'm  tabs\tand\n\nlines", *drawn]


def test_ids_and_text_equal_the_originals(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 320
    assert list(SPECIAL_TOKENS[9:14]) == [
        "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<extra_id_12>", "<extra_id_13>"
    ]  # fmt: skip
    for text in texts():
        ids = tokenizer(text).input_ids
        assert ids == original_ids(text), text
        assert tokenizer.decode(ids) == "<bos>" + text
        plain = bytes(index - 64 for index in ids if index >= 64).decode()
        assert tokenizer.decode(ids, skip_special_tokens=True) == plain
    assert tokenizer("ab", add_special_tokens=False).input_ids == [161, 162]
    assert tokenizer.eos_token == "<|eot_id|>"  # of the config


def test_chat_template_renders_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    def turn(role: str, text: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"

    asked = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "yes"}]
    ask = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    shown = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert shown == "<bos>" + turn("system", "") + turn("user", "Hi ") + turn("assistant", "yes") + ask
    system = [{"role": "system", "content": "Be brief."}, *asked]
    shown = tokenizer.apply_chat_template(system, tokenize=False)
    assert shown == "<bos>" + turn("system", "Be brief.") + turn("user", "Hi ") + turn("assistant", "yes")
    with pytest.raises(Exception, match="user or assistant"):
        tokenizer.apply_chat_template([*asked, {"role": "tool", "content": ""}], tokenize=False)


TEXTS = make_texts() + torch.randint(VOCAB, (20, 60), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def by_trying() -> Reference:
    reference = object.__new__(Reference)
    reference.table, reference.special, reference.context = make_table(TEXTS), list(SPECIAL), LONGEST
    return reference


def test_longest_suffix_is_found(by_trying: Reference) -> None:
    table = build_suffixes([by_trying.table, by_trying.special], CONFIG)
    lengths = set()
    for text in TEXTS:
        rows = [[text[t - j] if j <= t else ABSENT for j in range(LONGEST)] for t in range(len(text))]
        found = table(torch.tensor(rows)).tolist()
        assert found == [by_trying.subword(text, t) for t in range(len(text))]
        keys = {value - 1: key.count(",") + 1 for key, value in by_trying.table.items()}
        lengths |= {keys[subword] for subword in found}
    assert lengths >= set(range(1, LONGEST + 1))  # the texts reach every length


def test_invalid_table_is_refused() -> None:
    long = {",".join(["1"] * (LONGEST + 1)): 4}
    for entry in (None, [{}], [{"a": 1}, []], [["1"], []], [long, []], [{"1": SUBWORDS + 1}, []]):
        with pytest.raises(CheckpointError, match="restore config"):
            build_suffixes(entry, CONFIG)
