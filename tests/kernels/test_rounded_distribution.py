"""Drafts from a half-precision distribution, verified by vLLM's own kernels: the output has the target's distribution.

The temperature is low, so that rounding errors are large and few draws show a difference.
"""

from __future__ import annotations

import pytest
import torch

from tests.support import forks
from tests.support.distributions import noise_floor, total_variation

VOCAB, COMPONENTS, DRAWS, TEMPERATURE = 6, 2, 1200, 0.003
TARGET = [0.3, 0.25, 0.2, 0.15, 0.07, 0.03]


def _first_tokens(is_injected: bool) -> tuple[list[int], float]:
    """First tokens of DRAWS requests that draft one token each, and the share of drafts that are kept.

    is_injected: the draft is drawn from the distribution in float32, and only the cache is rounded.
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    from vllm_mtpc.circuits import get_circuit
    from vllm_mtpc.kernels.draft.kernel import Drafter

    generator, program = torch.Generator().manual_seed(4), get_circuit("cp", 2, COMPONENTS).program
    leaf = torch.randn(1, 1, COMPONENTS, VOCAB, generator=generator) * 2 * TEMPERATURE
    root = torch.randn(1, COMPONENTS, generator=generator)
    params = (root.sigmoid().log(), leaf, root, torch.zeros(1, 0, COMPONENTS, COMPONENTS))
    requests, rows = torch.arange(DRAWS), torch.arange(2 * DRAWS)
    temperature, seeds = torch.full((DRAWS,), TEMPERATURE), torch.randint(2**40, (DRAWS,), generator=generator)
    drafts, cache = torch.zeros(DRAWS, 1, dtype=torch.int64), torch.zeros(DRAWS, 1, VOCAB)
    cache = cache if is_injected else cache.bfloat16()
    drafter = Drafter(program, COMPONENTS, VOCAB, torch.device("cpu"), gumbel_noised_argmax)
    drafter(
        *(part.expand(DRAWS, *part.shape[1:]) for part in params),
        slots=requests,
        temperature=temperature,
        seeds=seeds,
        pos=torch.full((DRAWS,), 9),
        tokens=drafts,
        confidences=torch.zeros(DRAWS, 1),
        cache=cache,
    )
    fed = torch.stack([torch.zeros(DRAWS, dtype=torch.int64), drafts[:, 0]], dim=1).flatten()
    sampled, num_sampled = rejection_sample(
        torch.tensor(TARGET).log().expand(2 * DRAWS, VOCAB).contiguous(),  # temperature is in it
        cache.bfloat16(),
        fed,
        torch.arange(DRAWS + 1, dtype=torch.int32) * 2,
        9 + rows % 2,
        requests.int(),
        *((rows // 2).int(), (rows % 2).int()),
        *(temperature, seeds, 1),
    )
    return sampled[:, 0].tolist(), float((num_sampled > 1).float().mean())


@pytest.mark.parametrize("is_injected", [False, True], ids=["exact", "injected"])
def test_distribution_of_drafts_from_bfloat16(is_injected: bool) -> None:
    """The fault, rounding the cache and not the sampled distribution, moves the distribution by 0.28."""
    tokens, kept = forks.call("v2", "tests.kernels.test_rounded_distribution:_first_tokens", is_injected, timeout=600)
    distribution = torch.tensor(TARGET).double().numpy()
    distance = total_variation([[token] for token in tokens], distribution, VOCAB)
    floor = noise_floor(distribution, DRAWS)
    print(f"TV {distance:.4f}, allowed {floor:.4f}, kept {kept:.2f}")
    assert 0.2 < kept < 0.9  # acceptances and rejections alike
    assert (distance > floor) == is_injected
