"""``python -m benchmarks.demo.subword_target``: a small model of one of three families over a BPE, trained in minutes.

Defaults of serving are tested on them (scripts/other_targets.sh). Text and training are those of the byte-level demo
target; the BPE is learnt from the training part of the text.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from benchmarks.demo.corpus import Corpus, Split

LONG_STEPS = 50
HIDDEN_SIZE, LAYERS, HEAD_DIM = 192, 4, 32
EOS = 0
FAMILIES = {"qwen3": "qwen3", "phi3": "phi3", "neox": "gpt_neox"}
CHAT = (
    "{% for message in messages %}{{ '# ' + message['role'] + '\\n' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant\\n' }}{% endif %}"
)


def target_config(family: str, vocab_size: int, hidden_size: int) -> Any:
    """Return the config of a target of LAYERS layers."""
    from transformers import AutoConfig

    from benchmarks.demo import byte_target

    heads = hidden_size // HEAD_DIM
    own = {"head_dim": HEAD_DIM, "num_key_value_heads": heads, "rms_norm_eps": 1e-5}
    if family == "neox":
        own = {"rotary_pct": 1.0, "hidden_act": "gelu", "layer_norm_eps": 1e-5}
    if family == "phi3":
        own = {"num_key_value_heads": heads, "rms_norm_eps": 1e-5, "pad_token_id": EOS}
    return AutoConfig.for_model(
        FAMILIES[family],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        intermediate_size=8 * hidden_size // 3,
        max_position_embeddings=byte_target.LONG,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=family not in ("neox", "phi3"),
        bos_token_id=EOS,
        eos_token_id=EOS,
        dtype="float32",
        **own,
    )


def build_tokenizer(texts: list[bytes], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of vocab_size ids learnt from the texts; id 0 is end-of-text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from benchmarks.demo import byte_target

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[byte_target.EOS_TEXT],
        initial_alphabet=byte_target.byte_characters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode("utf-8", errors="replace") for text in texts), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives a BPE of {tokenizer.get_vocab_size()} ids, {vocab_size} are needed: name a longer text"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=byte_target.EOS_TEXT,
        eos_token=byte_target.EOS_TEXT,
        pad_token=byte_target.EOS_TEXT,
        model_max_length=byte_target.LONG,
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[bytes]) -> Split:
    """Documents in one array of ids, each starts with EOS; a line starts after every token that ends with a line
    break."""
    from benchmarks.demo.corpus import Split

    readable = [text.decode("utf-8", errors="replace") for text in texts]
    rows = [[EOS, *encoding.ids] for encoding in tokenizer.backend_tokenizer.encode_batch(readable)]
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int16)
    starts = torch.tensor([0, *(len(row) for row in rows[:-1])]).cumsum(0)
    ends_line = torch.tensor([tokenizer.decode([token]).endswith("\n") for token in range(len(tokenizer))])
    lines = (ends_line[tokens[:-1].long()] & (tokens[1:] != EOS)).nonzero()[:, 0] + 1
    return Split(tokens, starts, lines)


def as_subwords(text: Corpus, vocab_size: int) -> tuple[PreTrainedTokenizerFast, Corpus]:
    """A BPE of the training part, and both parts in its ids."""
    from benchmarks.demo.corpus import Corpus, documents

    train, valid = documents(text.train), documents(text.valid)
    tokenizer = build_tokenizer(train, vocab_size)
    return tokenizer, Corpus(encode(tokenizer, train), encode(tokenizer, valid), text.sha256, text.files, text.bytes)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo.subword_target", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this text, not on the standard library")
    parser.add_argument("--steps", type=int, required=True, metavar="N")
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--vocab-size", type=int, required=True, metavar="V")
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE, metavar="D", help=f"default: {HIDDEN_SIZE}")
    return parser


def main() -> None:
    """Train, measure and save a target, with its recipe in provenance.json."""
    arguments = parser().parse_args()
    from benchmarks.demo import byte_target, corpus

    text = corpus.load_file(arguments.text) if arguments.text else corpus.load()
    tokenizer, subwords = as_subwords(text, arguments.vocab_size)
    num_bytes, num_tokens = len(text.valid.tokens), len(subwords.valid.tokens)
    print(
        f"corpus: {text.bytes} bytes; {arguments.vocab_size} ids, {num_bytes / num_tokens:.2f} bytes per token",
        flush=True,
    )
    config = target_config(arguments.family, arguments.vocab_size, arguments.hidden_size)
    started = time.monotonic()
    recipe = byte_target.Recipe(steps=arguments.steps, long_steps=min(LONG_STEPS, arguments.steps // 4))
    model = byte_target.train(subwords, config, recipe)
    byte_target.save(model, arguments.out, tokenizer)
    saved = byte_target.load(arguments.out)
    bits = byte_target.bits_per_byte(saved, subwords.valid)  # per token, here a subword
    results = {
        "bits_per_byte": bits * num_tokens / num_bytes,
        "bits_per_token": bits,
        "parameters": sum(parameter.numel() for parameter in saved.parameters()),
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    settings = {
        "family": arguments.family,
        "steps": arguments.steps,
        "long_steps": recipe.long_steps,
        "vocab_size": arguments.vocab_size,
        "hidden_size": arguments.hidden_size,
    }
    byte_target.write_record(arguments.out, parser().prog, text, settings=settings, figures=results)
    print(f"target: {results['bits_per_byte']:.3f} bits/byte on held-out text, {results['minutes']} minutes")


if __name__ == "__main__":
    main()
