"""A byte-level Llama written down once more: the longest suffix by trying all, then Hugging Face's Llama on the sums.

Also makes tiny random checkpoints in the published layout, stale stop ids included.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.evabyte_reference import SIZES, GreedyReference, make_evabyte
from tests.support.evabyte_reference import Reference as EvaByte

VOCAB, SUBWORDS, LONGEST = 265, 900, 16
FREQUENT = (97, 98, 99)  # most of the model's output, so that the table has its suffixes
SPECIAL = (256, 258, 259)  # as the file lists them: not counted from 1


def make_texts(count: int = 20, length: int = 60, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(len(FREQUENT), (count, length), generator=generator) + FREQUENT[0]).tolist()


def make_table(texts: list[list[int]], seed: int = 0) -> dict[str, int]:
    """`expand_input_ids_dict[0]`: every single token, and suffixes of all lengths that occur in `texts`."""
    generator = torch.Generator().manual_seed(seed)
    keys = {(token,): token for token in range(VOCAB)}
    while len(keys) < SUBWORDS:
        text = texts[int(torch.randint(len(texts), (), generator=generator))]
        end = int(torch.randint(1, len(text) + 1, (), generator=generator))
        length = min(end, int(torch.randint(2, LONGEST + 1, (), generator=generator)))
        keys.setdefault(tuple(reversed(text[end - length : end])), len(keys))
    table = {",".join(str(token + 1) for token in key): value + 1 for key, value in keys.items()}
    return {"": -1} | table  # the file has this entry, which is not used


def make_byte_llama(folder: Path, texts: list[list[int]], seed: int = 0) -> None:
    """A random byte-level Llama in float32 whose subwords come from `texts`."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, tie_word_embeddings=False, initializer_range=0.2, bos_token_id=256, eos_token_id=259)
    LlamaForCausalLM(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.expand_embed_tokens.weight"] = torch.randn(SUBWORDS, 64) * 0.5
    is_rare = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(FREQUENT), False)
    weights["lm_head.weight"][is_rare] *= 0.05
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written |= {
        "architectures": ["TPULlamaForCausalLM"],
        "model_type": "tpu_llama",
        "expand_input_ids": True,
        "expand_input_ids_maxlen": LONGEST,
        "expand_input_ids_vocab_size": SUBWORDS,
        "expand_input_ids_dict": [make_table(texts, seed), list(SPECIAL)],
        "add_qk_norm": False,
    }
    (folder / "config.json").write_text(json.dumps(written))
    _save_tokenizer(folder)
    stale = {"bos_token_id": 128000, "eos_token_id": [259, 128001, 128008, 128009], "_from_model_config": False}
    (folder / "generation_config.json").write_text(json.dumps(stale))


def _save_tokenizer(folder: Path) -> None:
    """As published: bytes are their own ids, and four words of the chat template are tokens wherever they stand."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [bytes_to_unicode()[byte] for byte in range(256)]
    names += ["<|begin_of_text|>", "<|end_header_id|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>"]
    names += ["assistant", "system", "user", "\u010a\u010a"]  # the last: two line breaks
    tokenizer = Tokenizer(models.Unigram([(name, 0.0) for name in names], unk_id=None))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names[256:261]])
    named = {"bos_token": names[256], "eos_token": names[259], "pad_token": names[258]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
        "+ m['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    )
    fast.save_pretrained(folder)


class Reference(GreedyReference):
    """The model by its definition; a `context` shorter than LONGEST is a fault that tests must notice."""

    def __init__(self, folder: Path, context: int = LONGEST) -> None:
        written = json.loads((folder / "config.json").read_text())
        self.table, self.special = written["expand_input_ids_dict"]
        self.context = context
        weights = load_file(folder / "model.safetensors")
        self.expand = weights.pop("model.expand_embed_tokens.weight")
        written |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        written.pop("expand_input_ids_dict")
        self.llama = LlamaForCausalLM(LlamaConfig.from_dict(written)).eval()
        self.llama.load_state_dict(weights)

    def subword(self, tokens: list[int], t: int) -> int:
        lengths = [1] if tokens[t] + 1 in self.special else range(min(self.context, t + 1), 0, -1)
        for length in lengths:
            key = ",".join(str(tokens[t - j] + 1) for j in range(length))
            if key in self.table:
                return self.table[key] - 1
        return 0

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Tensor:
        subwords = [self.subword(tokens, t) for t in range(len(tokens))]
        embeds = self.llama.model.embed_tokens(torch.tensor(tokens)) + self.expand[subwords]
        return self.llama.model(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        return self.llama.lm_head(self.hidden(tokens))


def make_byte_target(name: str, folder: Path) -> SimpleNamespace:
    """A tiny random target `evabyte` or `byte_llama`: its `reference`, its `sizes`, and three `texts`.

    They have unlike lengths: across EvaByte's windows of 32, with subwords of many lengths.
    """
    if name == "evabyte":
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randint(64, 320, (length,), generator=generator).tolist() for length in (101, 64, 37)]
        return SimpleNamespace(reference=EvaByte(make_evabyte(folder)), sizes=SIZES, texts=texts)
    written = make_texts()
    make_byte_llama(folder, written)
    reference, texts = Reference(folder), [text[:length] for text, length in zip(written, (60, 41, 23), strict=False)]
    return SimpleNamespace(reference=reference, sizes=reference.llama.config.to_dict(), texts=texts)
