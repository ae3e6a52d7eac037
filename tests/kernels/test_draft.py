"""The draft kernel against its definition: interpreted on a CPU, natively on a GPU.

The definition is asked for the conditionals along the kernel's own tokens, so that a tie broken the other way at one
position does not hide what follows.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support import draft_runner, recipe
from tests.support.draft_runner import Case, Drafts
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.kernels.draft import naive

torch.set_num_threads(1)
NO_TRITON = "triton is not installed: only the PyTorch definitions can be tested here (pip install triton)"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NO_TRITON)

INF = float("inf")
# float32 sums in another order, logarithms of another library: some units in the last place of log q, which is ~ -20
LOG_Q, CONFIDENCE = 2e-5, 1e-5
NOISED = 1e-3  # Gumbel noise -log(-log u) of u within 1e-4 of 1 or 0 amplifies a last place of u's logarithm


def case(name: str, n: int, r: int, vocab: int, batch: int, drafts: int, scale: float = 2.0, **options: object) -> Case:
    """Random circuits; slots with holes between them; temperature 0 in every third slot."""
    circuit = get_circuit(name, n, r)
    generator = torch.Generator().manual_seed(n * 1000 + r * 100 + vocab + batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    num_slots = batch + 3
    temperature = torch.rand(num_slots, generator=generator) + 0.3
    temperature[::3] = 0.0
    return Case(
        circuit.program,
        (
            normal(batch, r) - 5,
            normal(batch, drafts, r, vocab),
            normal(batch, r),
            normal(batch, circuit.num_inner, r, r),
        ),
        torch.randperm(num_slots, generator=generator)[:batch],
        temperature,
        torch.randint(2**40, (num_slots,), generator=generator),
        torch.randint(2**31, (batch,), generator=generator),
        **options,
    )


def with_leaf(base: Case, leaf: Tensor) -> Case:
    evidence, _, root, inner = base.params
    return replace(base, params=(evidence, leaf, root, inner))


def with_holes() -> Case:
    """Tokens without mass in some components, in all of them, and a component that has one token alone."""
    base = case("hmm", 8, 7, 63, 3, 4)
    leaf = base.params[1].clone()
    leaf[..., ::2] = -INF
    leaf[:, 1, 3, 5:] = -INF
    leaf[:, 2, :, :60] = -INF
    leaf[:, 3, 2, 2:] = -INF
    return with_leaf(base, leaf)


def one_hot() -> Case:
    base = case("btree", 8, 8, 320, 2, 3)
    leaf = torch.full_like(base.params[1], -INF)
    leaf[..., 17] = 3.0
    return with_leaf(base, leaf)


def strided() -> Case:
    """bfloat16, a slice of more positions, with other numbers behind every row."""
    base = case("cp", 8, 7, 63, 3, 4)
    leaf = torch.full((3, 6, 7, 70), 1e4, dtype=torch.bfloat16)
    leaf[:, 1:5, :, :63] = base.params[1].bfloat16()
    return with_leaf(base, leaf[:, 1:5, :, :63])


def padded() -> Case:
    """Rows -1, as in a dummy run or behind the last request of a graph."""
    base = case("btree", 3, 2, 63, 3, 2)
    return replace(base, slots=torch.tensor([-1, 4, -1]))


def rounded(dtype: torch.dtype) -> Case:
    """Laws that are kept in a half precision, at temperatures that make much of what was rounded off."""
    base = case("hmm", 5, 7, 63, 100, 4, scale=0.3)
    return replace(base, cache_dtype=dtype, temperature=base.temperature * 0.05)


def of_recipe() -> Case:
    """The circuit of CONTRIBUTING.md."""
    with recipe.registered():
        return case(recipe.NAME, 8, 7, 63, 2, 5)


BLOCKS = case("btree", 8, 32, 700, 2, 3)  # three blocks of 256 tokens, or six of 128
CASES: dict[str, Case] = {
    "btree 16": case("btree", 16, 8, 63, 1, 15),
    "hmm 15": case("hmm", 15, 7, 320, 3, 4),
    "cp 8": case("cp", 8, 32, 320, 1, 7),
    "cp 8, peaked": case("cp", 8, 2, 320, 3, 3, scale=20.0),
    "batch of 64": case("ff", 3, 1, 5, 64, 2),
    "btree 15": case("btree", 15, 2, 5, 3, 14),
    "two tokens": case("hmm", 2, 2, 5, 3, 1),
    "large": case("btree", 3, 2, 32_000, 1, 2),
    "large, one component": case("ff", 3, 1, 32_000, 3, 2),
    "blocks, one launch": replace(BLOCKS, one_launch=True),
    "blocks, several": replace(BLOCKS, one_launch=False),
    "one block, several launches": case("hmm", 8, 7, 63, 2, 4, one_launch=False),
    "float64 noise": case("cp", 5, 7, 63, 3, 3, use_fp64=True),
    "float64 noise, blocks": case("cp", 5, 32, 200, 1, 2, use_fp64=True, one_launch=False),
    "no draws": case("hmm", 8, 7, 63, 3, 3, draw=False, with_cache=False),
    "no draws, blocks": case("hmm", 8, 32, 200, 3, 2, draw=False, with_cache=False, one_launch=False),
    "holes": with_holes(),
    "holes, blocks": replace(with_holes(), one_launch=False),
    "one-hot": one_hot(),
    "flat": with_leaf(case("btree", 8, 8, 63, 3, 3), torch.zeros(3, 3, 8, 63)),
    "strided": strided(),
    "strided, blocks": replace(strided(), one_launch=False),
    "recipe": of_recipe(),
    "bfloat16 cache": rounded(torch.bfloat16),
    "float16 cache": rounded(torch.float16),
    "bfloat16 cache, blocks": replace(rounded(torch.bfloat16), one_launch=False),
    "padded": padded(),
    "padded, blocks": replace(padded(), one_launch=False),
}


ROUNDED = [name for name, asked in CASES.items() if asked.cache_dtype != torch.float32]


@pytest.fixture(scope="module")
def drafts() -> dict[str, Drafts]:
    return draft_runner.run(CASES)


def of_rows(asked: Case) -> tuple[Tensor, Tensor]:
    """Temperature and seed of every row [B]; 0 where it is padded."""
    is_padded, at = asked.slots < 0, asked.slots.clamp(min=0)
    return asked.temperature[at].masked_fill(is_padded, 0.0), asked.seeds[at].masked_fill(is_padded, 0)


def conditionals(asked: Case, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """log q [B, K, V] along tokens [B, K], by the definition, rounded to `dtype`; float32."""
    found = []

    def follow(log_q: Tensor, k: int) -> Tensor:
        found.append(log_q)
        return tokens[:, k]

    naive.draft(asked.program, *asked.params, follow, dtype)
    return torch.stack(found, dim=1)


def scored(asked: Case, got: Drafts) -> Tensor:
    """log q [B, K, V] that vLLM reads: by the definition, or where it is rounded the very numbers in the cache."""
    if asked.cache_dtype == torch.float32:
        return conditionals(asked, got.tokens)
    return got.cache[asked.slots, : got.tokens.shape[1]].float()


@pytest.mark.parametrize("name", list(CASES))
def test_conditionals_and_confidences(name: str, drafts: dict[str, Drafts]) -> None:
    asked, got = CASES[name], drafts[name]
    temperature, _ = of_rows(asked)
    wanted, law = conditionals(asked, got.tokens), scored(asked, got)
    for k in range(wanted.shape[1]):
        confidence = naive.confidence(
            law[:, k], temperature if asked.draw else asked.temperature[asked.slots], asked.draw
        )
        torch.testing.assert_close(got.confidences[:, k], confidence, atol=CONFIDENCE, rtol=0)
    if got.cache is not None:
        rows = asked.slots >= 0
        cached = got.cache[asked.slots[rows], : wanted.shape[1]]
        # a half precision's last place: Triton's interpreter cuts to bfloat16 where a GPU rounds
        rtol = 1e-6 if asked.cache_dtype == torch.float32 else torch.finfo(asked.cache_dtype).eps
        torch.testing.assert_close(cached.float(), wanted[rows], atol=LOG_Q, rtol=rtol)


@pytest.mark.parametrize("name", list(CASES))
def test_tokens_are_the_noised_argmax(name: str, drafts: dict[str, Drafts]) -> None:
    from tests.support.draft_noise import noised

    asked, got = CASES[name], drafts[name]
    temperature, seeds = of_rows(asked)
    wanted = scored(asked, got)
    assert ((got.tokens >= 0) & (got.tokens < wanted.shape[2])).all()
    for k in range(wanted.shape[1]):
        values = noised(wanted[:, k], seeds, asked.pos + k, temperature if asked.draw else temperature * 0)
        chosen = values.gather(1, got.tokens[:, k : k + 1])[:, 0]
        assert (chosen >= values.amax(dim=1) - NOISED).all(), k
        assert (chosen > -INF).all(), "a token without mass"


@pytest.mark.parametrize("name", ROUNDED)
def test_drawing_from_what_was_not_rounded_would_be_found(name: str, drafts: dict[str, Drafts]) -> None:
    """Tokens drawn from float32 and scored by what is stored fail the test above."""
    from tests.support.draft_noise import noised

    asked, got = CASES[name], drafts[name]
    temperature, seeds = of_rows(asked)
    law, exact, found = scored(asked, got), conditionals(asked, got.tokens), 0
    for k in range(law.shape[1]):
        planted = noised(exact[:, k], seeds, asked.pos + k, temperature).argmax(dim=1)
        values = noised(law[:, k], seeds, asked.pos + k, temperature)
        found += int((values.gather(1, planted[:, None])[:, 0] < values.amax(dim=1) - NOISED).sum())
    assert found > 0


def test_the_definition_picks_from_what_it_rounded() -> None:
    asked = CASES["bfloat16 cache"]
    tokens = torch.zeros(asked.params[1].shape[:2], dtype=torch.int64)
    exact, law = conditionals(asked, tokens), conditionals(asked, tokens, torch.bfloat16)
    assert torch.equal(law, exact.bfloat16().float()) and not torch.equal(law, exact)


def test_tokens_are_those_of_the_definition(drafts: dict[str, Drafts]) -> None:
    """Ties aside: with the same noise, nearly all rows are the same tokens."""
    from tests.support.draft_noise import noised

    rows = same = 0
    for name, asked in CASES.items():
        if name in ROUNDED:  # the interpreter rounds otherwise than PyTorch
            continue
        temperature, seeds = of_rows(asked)
        temperature = temperature if asked.draw else temperature * 0

        def pick(log_q: Tensor, k: int, asked: Case = asked, at: Tensor = temperature, seeds: Tensor = seeds) -> Tensor:
            return noised(log_q, seeds, asked.pos + k, at).argmax(dim=-1)

        wanted = naive.draft(asked.program, *asked.params, pick)
        rows += len(wanted)
        same += int((wanted == drafts[name].tokens).all(dim=1).sum())
    print(f"{same} of {rows} rows are the same tokens")
    assert same >= 0.98 * rows


def test_nothing_else_is_written(drafts: dict[str, Drafts]) -> None:
    for name, asked in CASES.items():
        cache, num_drafts = drafts[name].cache, asked.params[1].shape[1]
        if cache is not None:
            assert cache[:, num_drafts:].isnan().all(), name
            others = torch.ones(len(cache), dtype=torch.bool)
            others[asked.slots[asked.slots >= 0]] = False
            assert cache[others].isnan().all(), name


def test_paths(drafts: dict[str, Drafts]) -> None:
    """Small leaves take one launch, large ones several; both draft the same."""
    assert drafts["cp 8"].one_launch and drafts["btree 16"].one_launch
    assert not drafts["large"].one_launch and not drafts["large, one component"].one_launch
    one, several = drafts["blocks, one launch"], drafts["blocks, several"]
    assert one.one_launch and not several.one_launch
    assert torch.equal(one.tokens, several.tokens)
    torch.testing.assert_close(one.cache, several.cache, atol=LOG_Q, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(one.confidences, several.confidences, atol=CONFIDENCE, rtol=0)


def test_too_many_components_are_refused() -> None:
    from vllm_mtpc.kernels.draft.kernel import Drafter

    with pytest.raises(ValueError, match="num_components=129"):
        Drafter(get_circuit("cp", 4, 129).program, 129, 10, torch.device("cpu"), None)


def test_confidence_is_the_probability_of_meeting_the_draft_again() -> None:
    law = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    temperature = torch.tensor([0.0, 0.5, 2.0])
    sharpened = torch.tensor([25.0, 9.0, 4.0]) / 38
    wanted = torch.tensor([0.5, float(sharpened.square().sum()), 1.0])
    torch.testing.assert_close(naive.confidence(law.log(), temperature), wanted)
    wanted = torch.tensor([0.5, 25 / 38, 1.0])
    torch.testing.assert_close(naive.confidence(law.log(), temperature, draw=False), wanted)
