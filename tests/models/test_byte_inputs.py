"""EvaByte's tokenizer, its chat template and the longest known suffix by their definitions; refused configs."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.byte_llama_reference import LONGEST, SPECIAL, VOCAB, Reference, make_table, make_texts
from tests.support.evabyte_reference import SIZES
from vllm_mtpc.config.byte_targets import ByteLlamaConfig, EvaByteConfig, check_byte_llama, check_evabyte, known_ids
from vllm_mtpc.errors import CheckpointError, ServeConfigError
from vllm_mtpc.hf.bytes.tokenizer import SPECIAL_TOKENS, build_tokenizer
from vllm_mtpc.kernels.suffixes import ABSENT, SuffixTable, read_table

EOT = 11


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


def test_ids_and_text_equal_the_originals() -> None:
    tokenizer = build_tokenizer(EOT)
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
    # the end of an answer is that of the config
    assert (tokenizer.eos_token, build_tokenizer().eos_token) == ("<|eot_id|>", "<eos>")


def test_chat_template_renders_turns() -> None:
    tokenizer = build_tokenizer(EOT)

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


def test_unsupported_config_is_refused() -> None:
    config = EvaByteConfig.from_dict(SIZES)
    check_evabyte(config)
    assert config.rope_parameters["rope_theta"] == SIZES["rope_theta"]
    assert (config.window_size, config.chunk_size, config.eos_token_id) == (32, 4, EOT)
    for change, named in (
        ({"attention_class": "softmax"}, "attention_class='softmax'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"window_size": 30}, "multiples of chunk_size"),
        ({"norm_add_unit_offset": False}, "norm_add_unit_offset=False"),
    ):
        with pytest.raises(ServeConfigError, match=named):
            check_evabyte(EvaByteConfig.from_dict(SIZES | change))


TEXTS = make_texts() + torch.randint(VOCAB, (20, 60), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def by_trying() -> Reference:
    reference = object.__new__(Reference)
    reference.table, reference.special, reference.context = make_table(TEXTS), list(SPECIAL), LONGEST
    return reference


def test_longest_suffix_is_found(by_trying: Reference) -> None:
    table = SuffixTable(*read_table([by_trying.table, by_trying.special]), LONGEST)
    lengths = set()
    for text in TEXTS:
        rows = [[text[t - j] if j <= t else ABSENT for j in range(LONGEST)] for t in range(len(text))]
        found = table(torch.tensor(rows)).tolist()
        assert found == [by_trying.subword(text, t) for t in range(len(text))]
        keys = {value - 1: key.count(",") + 1 for key, value in by_trying.table.items()}
        lengths |= {keys[subword] for subword in found}
    assert lengths >= set(range(1, LONGEST + 1))  # the texts reach every length


def test_special_id_stops_suffixes_one_token_before() -> None:
    """The off-by-one of training: a special id of 256 in the file stops suffixes after byte 255, not after 256."""
    table = {"256": 7, "256,98": 8, "257": 9, "257,98": 10}
    lookup = SuffixTable(*read_table([table, [256]]), 2)
    assert lookup(torch.tensor([[255, 97], [256, 97], [97, 255]])).tolist() == [6, 9, 0]


def test_invalid_table_or_config_is_refused() -> None:
    with pytest.raises(CheckpointError, match="more than 2 tokens"):
        SuffixTable({(1, 2, 3): 4}, (), 2)
    for entry in (None, [{}], [{"a": 1}, []], [["1"], []]):
        with pytest.raises(CheckpointError, match="restore config"):
            read_table(entry)
    with pytest.raises(ServeConfigError, match="plain Llama"):
        check_byte_llama(ByteLlamaConfig(vocab_size=VOCAB))
    expanding = {"expand_input_ids": True, "expand_input_ids_maxlen": 16, "expand_input_ids_vocab_size": 9}
    check_byte_llama(ByteLlamaConfig(vocab_size=VOCAB, **expanding))
    with pytest.raises(ServeConfigError, match="add_qk_norm"):
        check_byte_llama(ByteLlamaConfig(vocab_size=VOCAB, add_qk_norm=True, **expanding))


def test_config_drops_the_table_and_stale_ids() -> None:
    config = ByteLlamaConfig(
        vocab_size=VOCAB, eos_token_id=[128001, 259], bos_token_id=128000, expand_input_ids_dict=[]
    )
    assert not hasattr(config, "expand_input_ids_dict")
    assert (config.eos_token_id, config.bos_token_id) == ([259], None)
    assert (known_ids(259, VOCAB), known_ids(265, VOCAB), known_ids([300], VOCAB), known_ids(0, VOCAB)) == (
        259, None, None, 0
    )  # fmt: skip
