"""Components by low-rank differences: the stated function, and its support."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtpc.heads.components import split, split_within

torch.set_num_threads(1)
SIZES = st.tuples(*(st.integers(1, most) for most in (3, 4, 3, 5, 4, 9)))  # B, k, r, R_c, D, V


def random(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SIZES, st.integers(0, 99), st.data())
def test_logits_are_the_base_and_a_low_rank_term_in_all_of_the_vocabulary_or_within_a_support(sizes, seed, data):
    B, k, r, c, D, V = sizes
    base, states, a, b = random(seed, (B, k, V), (B, k, D), (k, r, c, D), (k, c, V))
    wanted = torch.einsum("bkd,kzcd,kcv->bkzv", states, a, b) + base[:, :, None]
    torch.testing.assert_close(split(base, states, a, b), wanted)
    support = data.draw(st.integers(1, V))
    logits, tokens = split_within(base, states, a, b, support)
    assert tokens.shape == (B, k, support) and all(len(set(row)) == support for row in tokens.flatten(0, 1).tolist())
    torch.testing.assert_close(logits, wanted.gather(3, tokens[:, :, None].expand(-1, -1, r, -1)))
    others = base.scatter(2, tokens, -torch.inf).amax(-1)
    assert (base.gather(2, tokens).amin(-1) >= others).all()
