"""EvaByte's tokenizer against the original's rules, and its chat template; which configs are refused."""

from __future__ import annotations

import random

import pytest

from tests.support.evabyte_reference import SIZES
from vllm_mtpc.config.byte_targets import EvaByteConfig, check_evabyte
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.hf.bytes.tokenizer import SPECIAL_TOKENS, build_tokenizer

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
