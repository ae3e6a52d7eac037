"""The draft kernel against its definition: interpreted on a CPU, natively on a GPU.

The definition is asked for the conditionals along the kernel's own tokens, so that a tie broken the other way at one
position does not hide what follows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support import draft_cases, forks, interpreted
from tests.support.distributions import noise_floor, total_variation
from tests.support.draft_cases import CASES, INF, TOKEN_CASES, Case, Drafts
from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.draft import naive

torch.set_num_threads(1)

# float32 sums in another order, logarithms of another library: some units in the last place of log q, which is ~ -20
LOG_Q, CONFIDENCE = 2e-5, 1e-5
NOISED = 1e-3  # Gumbel noise -log(-log u) of u within 1e-4 of 1 or 0 amplifies a last place of u's logarithm
ALL = pytest.mark.parametrize("name", list(CASES))
ROUNDED = [name for name, asked in CASES.items() if asked.cache_dtype != torch.float32]


@pytest.fixture(scope="module")
def drafts() -> dict[str, Drafts]:
    return interpreted.launch(draft_cases.draft_all, CASES)


def conditionals(asked: Case, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """log q [B, K, V] along tokens [B, K], by the definition, rounded to `dtype`; float32."""
    found = []

    def follow(log_q: Tensor, k: int) -> Tensor:
        if asked.allowed is not None:
            log_q = log_q.masked_fill(~draft_cases.bits(asked.allowed[:, k], log_q.shape[1]), -INF)
        found.append(log_q)
        return tokens[:, k]

    naive.draft(asked.program, *asked.params, pick=follow, dtype=dtype, shard=asked.shard)
    return torch.stack(found, dim=1)


def scored(asked: Case, got: Drafts) -> Tensor:
    """log q [B, K, V] that vLLM reads: by the definition, or where it is rounded the very numbers in the cache."""
    if asked.cache_dtype == torch.float32:
        return conditionals(asked, got.tokens)
    return got.cache[asked.slots, : got.tokens.shape[1]].float()


def noised(asked: Case, log_q: Tensor) -> Tensor:
    """log q [B, K, V] with the noise of the case's requests; padded rows and those without draws have none."""
    at = asked.slots.clamp(min=0)
    temperature = asked.temperature[at].masked_fill((asked.slots < 0) | (not asked.draw), 0.0)
    columns = enumerate(log_q.unbind(1))
    seeds = asked.seeds[at]
    return torch.stack([draft_cases.noised(part, seeds, asked.pos + k, temperature) for k, part in columns], dim=1)


@ALL
def test_conditionals_and_confidences(name: str, drafts: dict[str, Drafts]) -> None:
    asked, got = CASES[name], drafts[name]
    wanted, distribution, rows = conditionals(asked, got.tokens), scored(asked, got), asked.slots >= 0
    temperature = asked.temperature[asked.slots.clamp(min=0)].masked_fill(~rows, 0.0)
    for k in range(wanted.shape[1]):
        confidence = naive.confidence(distribution[:, k], temperature, asked.draw)
        torch.testing.assert_close(got.confidences[:, k], confidence, atol=CONFIDENCE, rtol=0)
    if got.cache is not None:
        cached = got.cache[asked.slots[rows], : wanted.shape[1]]
        # a half precision's last place: Triton's interpreter truncates to bfloat16 where a GPU rounds
        rtol = 1e-6 if asked.cache_dtype == torch.float32 else torch.finfo(asked.cache_dtype).eps
        torch.testing.assert_close(cached.float(), wanted[rows], atol=LOG_Q, rtol=rtol)
        # no other slot is written
        assert got.cache[:, wanted.shape[1] :].isnan().all()
        others = torch.ones(len(got.cache), dtype=torch.bool)
        others[asked.slots[rows]] = False
        assert got.cache[others].isnan().all()


@ALL
def test_tokens_are_the_noised_argmax(name: str, drafts: dict[str, Drafts]) -> None:
    asked, tokens = CASES[name], drafts[name].tokens
    wanted = scored(asked, drafts[name])
    assert ((tokens >= 0) & (tokens < wanted.shape[2])).all()
    values = noised(asked, wanted)
    chosen = values.gather(2, tokens[..., None])[..., 0]
    assert (chosen >= values.amax(dim=2) - NOISED).all()
    assert (chosen > -INF).all(), "a token without mass"


@pytest.mark.parametrize("name", ROUNDED)
def test_fault_of_drawing_from_unrounded_conditionals_is_found(name: str, drafts: dict[str, Drafts]) -> None:
    """Tokens drawn from float32 and scored by the rounded cache fail the test above."""
    asked, got = CASES[name], drafts[name]
    injected = noised(asked, conditionals(asked, got.tokens)).argmax(dim=2)
    values = noised(asked, scored(asked, got))
    assert (values.gather(2, injected[..., None])[..., 0] < values.amax(dim=2) - NOISED).any()


class OfAnotherRequest(Bigram):
    """Takes the token before from the row above."""

    def bias(self, k: int, previous: Tensor) -> Tensor:
        return super().bias(k, previous.roll(1))


class OfFirstToken(Bigram):
    """Takes the first token before every draft."""

    def bias(self, k: int, previous: Tensor) -> Tensor:
        self.source.first = previous if k == 0 else self.source.first
        return super().bias(k, self.source.first)


# where there is more than one token to draft
BIASED = [name for name, asked in TOKEN_CASES.items() if asked.draw and "holes" not in name]


@pytest.mark.parametrize("fault", [OfAnotherRequest, OfFirstToken])
@pytest.mark.parametrize("name", BIASED)
def test_fault_of_a_bias_of_another_token_is_found(name: str, fault: type[Bigram], drafts: dict[str, Drafts]) -> None:
    """Conditionals that the definition makes of wrong tokens are not those in the cache."""
    asked, got = CASES[name], drafts[name]
    *params, bigram = asked.params
    wrong = conditionals(replace(asked, params=(*params, fault(*bigram))), got.tokens)
    rows, begin = asked.slots >= 0, 1 if fault is OfFirstToken else 0  # the draft where the fault begins
    apart = (got.cache[asked.slots[rows], : got.tokens.shape[1]] - wrong[rows]).abs().amax(dim=-1)[:, begin:]
    # a token may be before two drafts in a row, or before those of two requests
    assert (apart > 100 * LOG_Q).sum() >= 0.9 * apart.numel()


def test_definition_picks_from_rounded_conditionals() -> None:
    asked = CASES["bfloat16 cache"]
    tokens = torch.zeros(asked.params[1].shape[:2], dtype=torch.int64)
    exact, distribution = conditionals(asked, tokens), conditionals(asked, tokens, torch.bfloat16)
    assert torch.equal(distribution, exact.bfloat16().float()) and not torch.equal(distribution, exact)


def test_both_paths_draft_the_same(drafts: dict[str, Drafts]) -> None:
    """Small leaves take one launch, large ones several; both draft the same."""
    assert drafts["cp 8"].one_launch and drafts["btree 16"].one_launch
    assert not drafts["large"].one_launch and not drafts["large, one component"].one_launch
    one, several = drafts["several blocks"], drafts["several blocks, blocks"]
    assert one.one_launch and not several.one_launch
    assert torch.equal(one.tokens, several.tokens)
    torch.testing.assert_close(one.cache, several.cache, atol=LOG_Q, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(one.confidences, several.confidences, atol=CONFIDENCE, rtol=0)


@pytest.mark.parametrize("name", draft_cases.MASKED)
def test_fault_of_the_mask_of_another_draft_is_found(name: str, drafts: dict[str, Drafts]) -> None:
    asked, got = CASES[name], drafts[name]
    wrong = conditionals(replace(asked, allowed=asked.allowed.roll(1, dims=1)), got.tokens)[asked.slots >= 0]
    cached = got.cache[asked.slots[asked.slots >= 0], : got.tokens.shape[1]]
    assert (cached.isinf() != wrong.isinf()).any(dim=-1).all()


def test_confidence_equals_its_definition() -> None:
    distribution = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    temperature = torch.tensor([0.0, 0.5, 2.0])
    sharpened = torch.tensor([25.0, 9.0, 4.0]) / 38
    for draw, second in ((True, float(sharpened.square().sum())), (False, 25 / 38)):
        wanted = torch.tensor([0.5, second, 1.0])
        torch.testing.assert_close(naive.confidence(distribution.log(), temperature, draw), wanted)


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
    tokens, kept = forks.call("v2", "tests.kernels.test_draft:_first_tokens", is_injected, timeout=600)
    distribution = torch.tensor(TARGET).double().numpy()
    distance = total_variation([[token] for token in tokens], distribution, VOCAB)
    floor = noise_floor(distribution, DRAWS)
    print(f"TV {distance:.4f}, allowed {floor:.4f}, kept {kept:.2f}")
    assert 0.2 < kept < 0.9  # acceptances and rejections alike
    assert (distance > floor) == is_injected
