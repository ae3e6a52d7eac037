"""The config of an EvaByte, the options that are supported, and its tokenizer.

The tokenizer is fast, with the ids and text of the original, which is slow and needs remote code:

    0..63        special tokens, found in text as themselves
    64 + b       the byte b of UTF-8

A text starts with <bos>; no token is added at its end. Invalid UTF-8 decodes to U+FFFD; the original drops it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vllm_mtpc.errors import ServeConfigError

GPU_BLOCK = 256  # tokens; its summaries fill a page of FlashAttention for chunks of up to 16 tokens
DEFAULT_EOS = 2
DEFAULTS = {  # EvaByte-6.5B, where it is not LlamaConfig's
    "vocab_size": 320,
    "num_pred_heads": 8,
    "window_size": 2048,
    "chunk_size": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
}
# Options of the original code with the only supported value, which all published checkpoints have.
SUPPORTED = {
    "attention_class": "eva",
    "norm_add_unit_offset": True,
    "attention_bias": False,
    "num_chunks": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SPECIAL_TOKENS = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "<sep>", "<repo_name>", "<file_sep>", "<t2v_token>", "<v2t_token>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(f"<extra_id_{i}>" for i in range(12, 64)),
)
CHAT_TEMPLATE = Path(__file__).with_name("evabyte.jinja")


class EvaByteConfig(LlamaConfig):
    """The config of an EvaByte. Other keys of the original config are kept."""

    model_type = "evabyte"

    def __init__(self, **options: Any) -> None:
        super().__init__(**DEFAULTS | options)


def check_evabyte(config: EvaByteConfig) -> None:
    """Raise ServeConfigError for options of the original code that are not supported."""
    allowed = SUPPORTED | {"num_key_value_heads": config.num_attention_heads}  # EVA has one key head per query head
    for name, value in allowed.items():
        if (found := getattr(config, name, value)) != value:
            raise ServeConfigError(f"EvaByte with {name}={found!r} is not served; allowed: {value!r}")
    if config.window_size % config.chunk_size:
        raise ServeConfigError(
            f"EvaByte with window_size={config.window_size}, chunk_size={config.chunk_size}: allowed: "
            "multiples of chunk_size"
        )


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
