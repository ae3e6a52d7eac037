"""A fast tokenizer for EvaByte, with the ids and text of the original, which is slow and needs remote code.

    0..63        special tokens, found in text as themselves
    64 + b       the byte b of UTF-8

A text starts with <bos>; no token is added at its end. Invalid UTF-8 decodes to U+FFFD; the original drops it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL_TOKENS = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "<sep>", "<repo_name>", "<file_sep>", "<t2v_token>", "<v2t_token>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(f"<extra_id_{i}>" for i in range(12, 64)),
)
DEFAULT_EOS = 2

CHAT_TEMPLATE = Path(__file__).with_name("evabyte.jinja")


def build_tokenizer(eos_token_id: int = DEFAULT_EOS, **options: Any) -> PreTrainedTokenizerFast:
    """The tokenizer; `eos_token_id` names the special token that ends an answer (11, <|eot_id|>, for EvaByte-SFT)."""
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {character: len(SPECIAL_TOKENS) + byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token=SPECIAL_TOKENS[eos_token_id],
        unk_token="<unk>",
        sep_token="<sep>",
        clean_up_tokenization_spaces=False,
        **options,
    )
    fast.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return fast
