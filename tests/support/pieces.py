"""What draft layers and backbones are asked: prompts that are read in pieces, found in the prefix cache, preempted."""

from __future__ import annotations

VOCAB, LONGEST, BLOCK = 48, 96, 32
PROMPTS = [[3, 9, 4], [7, 7, 1, 12, 5, 2, 30, 41] * 3, [8], [20, 21, 22, 23, 24]]
SMALL = {
    "skip_tokenizer_init": True,
    "max_model_len": LONGEST,
    "max_num_seqs": 4,
    "block_size": BLOCK,
    "max_num_batched_tokens": 16,
}
