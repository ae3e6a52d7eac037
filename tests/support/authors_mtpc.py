"""Checkpoints in the layout of the MtPC authors' code, and their exact distribution.

The distribution is an enumeration over all tokens and latents in float64. Sum heads go from the leaves to the root;
W[k][f, o, i] = softmax over i of <proj[f, o, i], h>.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.support.enumeration import Enumerated
from vllm_mtpc.circuits.base import CircuitParams

LEAF = "mt_head._categorical_log_probs_heads.0.head.proj"
SUM = "mt_head._sum_weights_heads.{}.head.proj"
SCOPE = "circuit._circuit._nodes.0._scope_idx"
BIAS = "mt_head._sum_weights_heads.{}.head.bias"
CONFIG = """\
name: mtp-${{circuit.name}}
run: ./logs/${{now:%Y-%m-%d}}
global_step: 900
data:
  vocab_size: {vocab_size}
lm:
  name: byte
  n_embd: {hidden_size}
  n_head: 2
  last_2_layers: [1, 2]
  last_1_layers:
  - 2
  model:
    _target_: mtp.models.lm.LM
    from_huggingface: someone/a-byte-model
    adaptor_kwargs: ${{adaptor.hyperparameters}}
    freeze: true
circuit:
  name: {kind}
  n_token: {n}
  n_component: {r}
  n_repetition: 1
  model:
    _target_: mtp.models.circuits.CircuitModel
    vocab_size: ${{data.vocab_size}}
    n_token: ${{circuit.n_token}}
    n_component: ${{circuit.n_component}}
    n_repetition: ${{circuit.n_repetition}}
    kind: {kind}
mt_head:
  name: linear-evabyte
  hyperparameters:
    type: evabyte
    n_embd: ${{lm.n_embd}}
    transformer_n_head: ${{lm.n_head}}
    transformer_n_layer: 0
    expander_type: linear
    freeze_vocab_unembedding: false
    share_sum_weights: false
    contextual_hmm_weights: true
    init_hmm_identity: {identity}
{adaptor}
model:
  model:
    circuit: ${{circuit.model}}
    mt_head_kwargs: ${{mt_head.hyperparameters}}
    beta: 0
    gamma: 0.9
"""
NO_ADAPTOR = "adaptor:\n  name: none\n  hyperparameters: null"


def shapes(kind: str, n: int, r: int) -> list[list[int]]:
    """Folds, outputs and inputs of the sum heads."""
    if kind == "hmm":
        return [[1, r, r]] * (n - 1) + [[1, 1, r]]
    folds = [] if kind == "cp" else [n >> level for level in range(1, n.bit_length() - 1)]
    return [[count, r, r] for count in folds] + [[1, 1, r]]


def state_dict(
    kind: str, n: int, r: int, vocab_size: int, hidden_size: int, has_bias: bool = False
) -> dict[str, Tensor | None]:
    """A `model_state_dict`, of an HMM with biases or without."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    state = {
        "_exp_gamma_weights": 0.9 ** torch.arange(n),
        "lm._lm.model.embed_tokens.weight": None,
        "lm._lm.model.layers.0.self_attn.q_proj.weight": None,
        "lm._lm.lm_head.weight": None,
        "circuit._autoregressive_mar_mask": torch.ones(n, n, dtype=torch.bool),
        "circuit._univariate_mar_mask": torch.ones(n, n, dtype=torch.bool),
        "circuit._circuit._address_book._in_fold_idx_1_0": torch.zeros(1, 1, dtype=torch.long),
        SCOPE: torch.arange(n)[:, None] if kind != "hmm" else torch.arange(n).flip(0)[:, None],
        LEAF: normal(n, r, vocab_size, hidden_size),
    }
    for k, shape in enumerate(shapes(kind, n, r) if r > 1 or kind != "cp" else []):
        state[SUM.format(k)] = normal(*shape, hidden_size)
        if has_bias and k < n - 1:
            state[BIAS.format(k)] = normal(*shape) + 3 * torch.eye(r)
    return state


def save(
    folder: Path, state: dict, kind: str, n: int, r: int, vocab_size: int, hidden_size: int, **settings: str
) -> Path:
    """Write model@900.pt with an optimiser's state, and config.yaml; return the path of the former."""
    folder.mkdir(exist_ok=True)
    moments = {"state": {0: {"exp_avg": torch.zeros(3), "step": torch.tensor(900.0)}}, "param_groups": [{"lr": 3e-4}]}
    whole = {"global_step": 900, "model_state_dict": state, "optimizer_state_dict": moments}
    torch.save({**whole, "scheduler_state_dict": None}, folder / "model@900.pt")
    values = {"identity": "false", "adaptor": NO_ADAPTOR} | settings
    text = CONFIG.format(kind=kind, n=n, r=r, vocab_size=vocab_size, hidden_size=hidden_size, **values)
    (folder / "config.yaml").write_text(text)
    return folder / "model@900.pt"


def distribution(state: dict, kind: str, hidden: Tensor) -> np.ndarray:
    """log p of every x_1 .. x_n (in the order of itertools.product) at hidden[D], [V ** n]."""
    proj, h = state[LEAF].double(), hidden.double()
    r = proj.shape[1]
    leaf = torch.empty_like(proj[..., 0])  # [n, r, V], by position
    leaf[state[SCOPE].flatten()] = (proj @ h).log_softmax(-1)
    sums = []
    while (name := SUM.format(len(sums))) in state:
        logits = state[name].double() @ h
        if (bias := state.get(BIAS.format(len(sums)))) is not None:
            logits = logits + bias.double()
        sums.append(logits.log_softmax(-1))
    root = sums[-1][0, 0] if sums else torch.zeros(1, dtype=torch.float64)
    # The transition from z_i to z_(i+1) of an HMM is head n - 1 - i. Fold j of head l of a tree is the region of tokens
    # j * 2**(l+1) onwards; both tokens of a pair read the latent of it.
    inner = torch.cat([root.new_zeros(0, r, r), *(sums[-2::-1] if kind == "hmm" else sums[:-1])])
    return Enumerated(kind, CircuitParams(leaf[None], root[None], inner[None])).table().ravel()
