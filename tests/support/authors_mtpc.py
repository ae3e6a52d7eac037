"""Checkpoints in the layout of the MtPC authors' code, and their exact distribution.

Both follow the paper's formulas and share no code with the package. The distribution is an enumeration over all tokens
and latents in float64. Sum heads go from the leaves to the root; W[k][f, o, i] = softmax over i of <proj[f, o, i], h>.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor

LEAF = "mt_head._categorical_log_probs_heads.0.head.proj"
SUM = "mt_head._sum_weights_heads.{}.head.proj"
SCOPE = "circuit._circuit._nodes.0._scope_idx"
BIAS = "mt_head._sum_weights_heads.{}.head.bias"
# Folds, outputs and inputs of the sum heads, by kind and window.
SUMS = {
    ("cp", 3): ["1 1 r"],
    ("cp", 4): ["1 1 r"],
    ("hmm", 2): ["1 r r", "1 1 r"],
    ("hmm", 3): ["1 r r", "1 r r", "1 1 r"],
    ("hmm", 4): ["1 r r", "1 r r", "1 r r", "1 1 r"],
    ("btree", 2): ["1 1 r"],
    ("btree", 4): ["2 r r", "1 1 r"],
    ("btree", 8): ["4 r r", "2 r r", "1 1 r"],
}
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
    return [[r if size == "r" else int(size) for size in text.split()] for text in SUMS.get((kind, n), [])]


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
    h = hidden.double().numpy()
    proj = state[LEAF].double().numpy()
    n, r, vocab_size, _ = proj.shape
    leaf: list[np.ndarray] = [None] * n  # by position: [r, V]
    for fold, position in enumerate(state[SCOPE].flatten().tolist()):
        leaf[position] = softmax(proj[fold] @ h, axis=-1)
    sums = []
    while (name := SUM.format(len(sums))) in state:
        logits = state[name].double().numpy() @ h
        if (bias := state.get(BIAS.format(len(sums)))) is not None:
            logits = logits + bias.double().numpy()
        sums.append(softmax(logits, axis=-1))
    tokens = np.array(list(product(range(vocab_size), repeat=n)))
    total = np.zeros(len(tokens))
    for weight, owner in _LATENTS[kind](sums, n, r):
        total += weight * np.prod([leaf[i][owner[i]][tokens[:, i]] for i in range(n)], axis=0)
    return np.log(total)


def _mixture(sums: list[np.ndarray], n: int, r: int):
    for z in range(r):
        yield (sums[0][0, 0, z] if sums else 1.0), [z] * n


def _chain(sums: list[np.ndarray], n: int, r: int):
    """The transition from z_i to z_(i+1), i = 1 .. n - 1, is head n - 1 - i; the root is head n - 1."""
    for z in product(range(r), repeat=n):
        weight = sums[n - 1][0, 0, z[0]]
        for i in range(1, n):
            weight = weight * sums[n - 1 - i][0, z[i - 1], z[i]]
        yield weight, z


def _tree(sums: list[np.ndarray], n: int, r: int):
    """Fold j of head l is the region of tokens j * 2**(l+1) onwards; both tokens of a pair read the latent of it."""
    regions = [(level, fold) for level in range(len(sums)) for fold in range(n >> (level + 1))]
    for states in product(range(r), repeat=len(regions)):
        z = dict(zip(regions, states, strict=True))
        weight = sums[-1][0, 0, z[len(sums) - 1, 0]]
        for level, fold in regions[:-1]:
            weight = weight * sums[level][fold, z[level + 1, fold // 2], z[level, fold]]
        yield weight, [z[0, i // 2] for i in range(n)]


_LATENTS = {"cp": _mixture, "hmm": _chain, "btree": _tree}
