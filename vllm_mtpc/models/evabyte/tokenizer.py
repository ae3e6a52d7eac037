"""A fast tokenizer for EvaByte, with the ids and text of the original, which is slow and needs remote code.

    0..63        special tokens, found in text as themselves
    64 + b       the byte b of UTF-8

A text starts with <bos>; no token is added at its end. Invalid UTF-8 decodes to U+FFFD; the original drops it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vllm_mtpc.models.evabyte.config import DEFAULT_EOS

SPECIAL_TOKENS = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "<sep>", "<repo_name>", "<file_sep>", "<t2v_token>", "<v2t_token>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(f"<extra_id_{i}>" for i in range(12, 64)),
)
CHAT_TEMPLATE = Path(__file__).with_name("evabyte.jinja")


class EvaByteTokenizer(PreTrainedTokenizerFast):
    """The tokenizer under the name of the original class, by which checkpoints name it."""

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *_: Any, truncation_side: str = "right", **options: Any
    ) -> EvaByteTokenizer:
        """Return the tokenizer of a folder or hub repository; of its files only `eos_token_id` is read.

        It is the special token that ends an answer: 11, <|eot_id|>, for EvaByte-SFT.
        """
        hub = {key: options[key] for key in ("revision", "cache_dir", "token") if key in options}
        config, _unused = PretrainedConfig.get_config_dict(str(name), **hub)
        vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
        vocab |= {character: len(SPECIAL_TOKENS) + byte for byte, character in bytes_to_unicode().items()}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocab["<bos>"])]
        )
        fast = cls(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            bos_token="<bos>",
            eos_token=SPECIAL_TOKENS[config.get("eos_token_id", DEFAULT_EOS)],
            unk_token="<unk>",
            sep_token="<sep>",
            clean_up_tokenization_spaces=False,
            truncation_side=truncation_side,
        )
        fast.name_or_path = str(name)
        fast.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
        return fast
