"""Memory, disk and hours of training a head, by arithmetic: the table of docs/training.md. Nothing here is measured.

    python -m benchmarks.numbers      writes the table

States: 2 P FLOPs per token at `STATES_SHARE` of the peak of every GPU; P: parameters of the target.
Training, per window:

    5 * 2 n D V                FLOPs with the lm_head, in the target's bfloat16: of the head forward, again and
                               backward, of the target's distribution forward and again
    4 * 2 n (r c + R) V        FLOPs of `component_rank` c and `token_rank` R, in float32
    LOGIT_PASSES * 4 n r V     bytes of logits that are read or written

`FLOAT32_SHARE` is that of a step on an H200 with the trainer of commit 76a64a0c2, which is not a kept result.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.synthetic import SHAPES
from vllm_mtpc.report import markdown

BFLOAT16_FLOPS, FLOAT32_FLOPS, BYTES_PER_SECOND = 989e12, 67e12, 3.35e12  # of an H100 SXM, without sparsity
STATES_SHARE = LM_HEAD_SHARE = 0.4  # of BFLOAT16_FLOPS
FLOAT32_SHARE, MEMORY_SHARE = 0.17, 0.6
LOGIT_PASSES = 20  # forward, again and backward: log-softmax, circuit, conditionals and loss
TOKENS = 100e6  # a window starts at each
WINDOW, COMPONENTS, COMPONENT_RANK, TOKEN_RANK = 8, 8, 16, 32
WINDOWS_PER_STEP = 4096
GIB = 2**30


@dataclass(frozen=True)
class Size:
    """Sizes of a target; gpus: that vLLM divides it over."""

    parameters: float
    hidden_size: int
    vocab_size: int
    gpus: int = 1
    is_tied: bool = False


SIZES = {
    "1B": Size(1.24e9, 2048, 128256, is_tied=True),
    "8B": Size(8.03e9, SHAPES["llama-8b"].hidden, SHAPES["llama-8b"].vocab),
    "70B, TP 8": Size(70.6e9, 8192, 128256, gpus=8),
}  # Llama 3


def head_parameters(size: Size) -> int:
    """Return the parameters of the btree head without a trunk."""
    import torch

    from vllm_mtpc.config.mtpc_config import HeadConfig
    from vllm_mtpc.heads.head import build_head

    sizes = {"vocab_size": size.vocab_size, "hidden_size": size.hidden_size}
    leaves = {"kind": "lm_head", "component_rank": COMPONENT_RANK, "token_rank": TOKEN_RANK}
    given = {"circuit": "btree", "window": WINDOW, "num_components": COMPONENTS}
    config = HeadConfig.create(**given, target=sizes, verifier="none", trunk={"kind": "none"}, leaves=leaves)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_head(config).parameters())


def trainer_bytes(size: Size) -> float:
    """Return the trainer's peak by the formula of docs/training.md, with embeddings and two blocks of states."""
    from vllm_mtpc.train.losses import CHUNK_BYTES, COPIES
    from vllm_mtpc.train.trainer import BLOCK_BYTES

    parameters = head_parameters(size)
    matrices = 2 * size.hidden_size * size.vocab_size * (1 if size.is_tied else 2)
    chunk = (4 + 1 / COMPONENTS) * CHUNK_BYTES / COPIES
    states = 4 * WINDOWS_PER_STEP * size.hidden_size + 2 * BLOCK_BYTES
    return 16 * parameters + matrices + states + max(8 * parameters, chunk)


def state_hours(size: Size) -> float:
    return 2 * size.parameters * TOKENS / (size.gpus * STATES_SHARE * BFLOAT16_FLOPS) / 3600


def window_seconds(size: Size) -> float:
    """Return the seconds of training on one window."""
    lm_head = 5 * 2 * WINDOW * size.hidden_size * size.vocab_size
    ranks = 4 * 2 * WINDOW * (COMPONENTS * COMPONENT_RANK + TOKEN_RANK) * size.vocab_size
    logits = LOGIT_PASSES * 4 * WINDOW * COMPONENTS * size.vocab_size
    return (
        lm_head / (LM_HEAD_SHARE * BFLOAT16_FLOPS)
        + ranks / (FLOAT32_SHARE * FLOAT32_FLOPS)
        + logits / (MEMORY_SHARE * BYTES_PER_SECOND)
    )


def table() -> str:
    """Return the table of docs/training.md."""
    rows = []
    for name, size in SIZES.items():
        state = 2 * size.hidden_size  # bytes, bfloat16
        row = {
            "target": name,
            "weights per GPU": f"{2 * size.parameters / size.gpus / GIB:.1f} GiB",
            "states per token": f"{state // 2**10} KiB",
            "cache of 100M tokens": f"{state * TOKENS / 1e9:,.0f} GB",
            "tokens of a block": f"{GIB // state:,}",
            "states of 100M tokens": f"{state_hours(size):.2f} h",
            "head": f"{head_parameters(size) / 1e6:.0f}M",
            "trainer": f"{trainer_bytes(size) / GIB:.1f} GiB",
            "training on 100M tokens": f"{window_seconds(size) * TOKENS / 3600:.0f} h",
        }
        rows.append(row)
    return markdown([*row], [[*one.values()] for one in rows]) + "\n"
