"""Expected tokens/step of a head under the serving rule, computed on the target's own text.

A step at position t knows h_t and the target's own token x_1; it drafts x_2..x_n from q(. | x_1.., h_t), and draft k
is accepted with probability min(1, p/q). The text that comes out is the target's whatever is drafted, so it can be
drawn first: given that the token at k came out as x_k, it was an accepted draft with probability
P(x_k drafted and accepted) / P(x_k comes out) = min(p, q) / p = min(1, q(x_k) / p(x_k)).
Averaged over text of the target this equals the average of min(1, p/q) over drafts, product by product: both are the
sum over paths of the product of min(p, q). No further target forward and no draft noise is needed. Greedy text:
a draft is accepted if the conditional argmax of q is the next greedy token.

Steps do not start everywhere equally often: an accepted draft is skipped over. ``tokens_per_step`` therefore follows
the steps through each continuation (exactly, by the probability that a step starts at each position) and is the
number of tokens by the number of steps, which is what a server counts.
"""

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from vllm_mtpc.train.heads import conditionals, window_batch
from vllm_mtpc.train.samples import Samples


@dataclass(frozen=True)
class Figures:
    """What one head does at one temperature; s.e. over sequences."""

    tokens_per_step: float  # the target's own token included; plain decoding is 1.0
    standard_error: float
    per_position: list[float]  # unconditional: P(drafts 1..k are all accepted), k = 1..n-1, over steps
    anywhere: float  # expected tokens of a step started at a uniformly chosen position
    sequences: int
    contexts: int

    def as_dict(self) -> dict[str, object]:
        """For provenance files."""
        return asdict(self)


@torch.inference_mode()
def acceptance(head: nn.Module, lm_head: Tensor, states: Tensor, tokens: Tensor, greedy: bool) -> Tensor:
    """P(draft k is accepted | the drafts before it are, text) for x_2..x_n.

    states: [B, n, D], tokens: [B, n], lm_head: [V, D]. Returns [B, n - 1].
    """
    log_q = conditionals(head.circuit, head(states[:, 0]), tokens)[:, 1:]  # [B, n - 1, V]
    chosen = tokens[:, 1:, None]
    if greedy:
        return (log_q.argmax(-1, keepdim=True) == chosen)[..., 0].float()
    log_p = (states[:, 1:] @ lm_head.T).log_softmax(-1)
    return (log_q.gather(-1, chosen) - log_p.gather(-1, chosen))[..., 0].clamp(max=0).exp()


def step_starts(alive: Tensor) -> Tensor:
    """Probability that a step starts at each position, the first one certain.

    alive[S, T, n-1] = P(the first k drafts of a step at t are accepted). Returns [S, T].
    """
    sequences, length, drafts = alive.shape
    at_least = torch.cat([torch.ones(sequences, length, 1), alive, torch.zeros(sequences, length, 1)], -1)
    exactly = at_least[..., :-1] - at_least[..., 1:]  # [S, T, n]: P(k drafts accepted), so the step advances by 1 + k
    starts = torch.zeros(sequences, length + drafts + 1)
    starts[:, 0] = 1
    for t in range(length):
        starts[:, t + 1 : t + drafts + 2] += starts[:, t : t + 1] * exactly[:, t]
    return starts[:, :length]


def ratio(numerator: Tensor, denominator: Tensor) -> tuple[float, float]:
    """Ratio of sums over independent sequences [S] and its standard error (linearised)."""
    value = (numerator.sum() / denominator.sum()).item()
    residual = numerator - value * denominator
    return value, (residual.std() * math.sqrt(len(residual)) / denominator.sum()).item()


@torch.inference_mode()
def measure(head: nn.Module, lm_head: Tensor, samples: Samples, greedy: bool, batch: int = 1024) -> Figures:
    """Evaluates ``head`` at every position of the continuations from the end of the prompt on."""
    window = head.circuit.window
    sequences, length = samples.tokens.shape
    first, count = samples.prompt - 1, length - window - samples.prompt + 1
    rows = torch.arange(sequences).repeat_interleave(count)
    positions = torch.arange(first, first + count).repeat(sequences)
    pieces = []
    for row, position in zip(rows.split(batch), positions.split(batch), strict=True):
        tokens, states = window_batch(samples, row, position, window)
        pieces.append(acceptance(head, lm_head, states, tokens, greedy))
    alive = torch.cat(pieces).view(sequences, count, window - 1).double().cumprod(-1)
    starts = step_starts(alive)
    steps = starts.sum(1)  # [S]
    per_position = (starts[..., None] * alive).sum((0, 1)) / steps.sum()
    # The tokens of the counted steps, also where the last one passes the end: no edge effect.
    value, error = ratio((starts * (1 + alive.sum(-1))).sum(1), steps)
    return Figures(
        tokens_per_step=value,
        standard_error=error,
        per_position=per_position.tolist(),
        anywhere=1 + alive.sum(-1).mean().item(),
        sequences=sequences,
        contexts=sequences * count,
    )
