"""Trains one MtPC head on windows of the target's own text.

Loss: L = sum_k gamma^(k-1) L_k / sum_k gamma^(k-1) with L_k the conditional negative log-likelihood
-log q(x_k | x_1..x_(k-1), h) (MtPC paper, section 4). The target's law of x_k is at hand (its hidden states are
cached), so L_k is its expectation under that law instead of one drawn token: the same objective with less noise.
"""

import torch
from torch import Tensor, nn
from tqdm import tqdm

from vllm_mtpc.circuits import Circuit, CircuitParams
from vllm_mtpc.circuits.base import evidence_of
from vllm_mtpc.config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.train.samples import Samples

SEED = 0
GAMMA = 0.9
STEPS = 2500
WINDOWS_PER_STEP = 384
LEARNING_RATE = 5e-3
WARM_UP = 30
GRAD_CLIP = 1.0


def conditionals(circuit: Circuit, params: CircuitParams, tokens: Tensor) -> Tensor:
    """log q(x_k = . | x_1..x_(k-1), h) along tokens[B, n], for every k. Returns [B, n, V]."""
    # One gather for all positions: one per position costs a full-size gradient of the leaves each.
    evidence = evidence_of(params.leaf, tokens)  # [B, n, r]
    state, weights = circuit.start(params), []
    for k in range(circuit.window):
        weights.append(state.weights)
        if k < circuit.window - 1:
            state = circuit.advance(params, state, k, evidence[:, k])
    # A mixture as a product of matrices: several times faster than logsumexp over [B, n, r, V], and backward too.
    mixture = torch.stack(weights, 1).exp()[:, :, None]  # [B, n, 1, r]
    tiny = torch.finfo(torch.float32).tiny
    return (mixture @ params.leaf.exp())[:, :, 0].clamp(min=tiny).log()


def window_batch(samples: Samples, rows: Tensor, positions: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Tokens x_1..x_n [B, n] after each position, and the hidden states [B, n, D] that predict each of them."""
    offsets = torch.arange(window)
    at = positions[:, None] + offsets
    return samples.tokens[rows[:, None], at + 1], samples.hidden[rows[:, None], at]


def head_loss(head: nn.Module, lm_head: Tensor, states: Tensor, tokens: Tensor, gamma: float = GAMMA) -> Tensor:
    """Discounted conditional negative log-likelihood in nats. states: [B, n, D], tokens: [B, n], lm_head: [V, D]."""
    with torch.no_grad():
        teacher = (states @ lm_head.T).softmax(-1)  # [B, n, V]
    log_q = conditionals(head.circuit, head(states[:, 0]), tokens)
    per_position = -(teacher * log_q).sum(-1).mean(0)  # [n]
    weights = gamma ** torch.arange(len(per_position))
    return (weights * per_position).sum() / weights.sum()


def train(
    config: HeadConfig, lm_head: Tensor, samples: Samples, steps: int = STEPS, windows: int = WINDOWS_PER_STEP
) -> nn.Module:
    """Trains from the fixed seed: every circuit sees the same windows in the same order."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    head = build_head(config)
    head.init_from_lm_head(lm_head, seed=SEED)
    optimizer = torch.optim.Adam(head.parameters(), lr=LEARNING_RATE, fused=True)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, total_iters=min(WARM_UP, max(1, steps // 4)))
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler([rise, fall])
    last = samples.tokens.shape[1] - config.window - 1
    bar = tqdm(range(steps), desc=config.circuit, unit="step", mininterval=5)
    for _ in bar:
        rows = torch.randint(0, len(samples.tokens), (windows,), generator=generator)
        positions = torch.randint(0, last + 1, (windows,), generator=generator)
        tokens, states = window_batch(samples, rows, positions, config.window)
        loss = head_loss(head, lm_head, states, tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), GRAD_CLIP)
        optimizer.step()
        scheduler.step()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    return head.eval().requires_grad_(False)
