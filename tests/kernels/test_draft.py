"""The draft kernel against its definition: interpreted on a CPU, natively on a GPU.

The definition is asked for the conditionals along the kernel's own tokens, so that a tie broken the other way at one
position does not hide what follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support import interpreted
from tests.support.interpreted import moved
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.kernels.draft import naive
from vllm_mtpc.kernels.filter import Program
from vllm_mtpc.kernels.leaf import Bigram, LowRank
from vllm_mtpc.kernels.uniform import uniform
from vllm_mtpc.kernels.uniform.kernel import uniform_kernel

INF = float("inf")
POISON = 2**62


@dataclass
class Case:
    program: Program
    params: tuple[Any, ...]  # as `DraftParams`
    slots: Tensor  # [B]
    temperature: Tensor  # [slots]
    seeds: Tensor  # [slots]
    pos: Tensor  # [B]
    one_launch: bool | None = None
    draw: bool = True  # else the argmax, without a cache
    cache_dtype: torch.dtype = torch.float32
    use_fp64: bool = False
    allowed: Tensor | None = None  # [B, K, words] int32, masks of tokens
    ids: Tensor | None = None  # [Vd], tokens of a leaf's columns
    num_tokens: int | None = None  # V, where it is not the number of columns

    @property
    def vocab_size(self) -> int:
        return self.num_tokens or self.params[1].shape[3]


def case(name, n, r, vocab, batch, drafts, scale=2.0, token_rank=0, dtype=torch.float32, **options) -> Case:
    """Random circuits; slots with holes between them; temperature 0 in every third slot.

    token_rank: that of a bigram in `dtype`, as large as the differences of logits. Rows of W2 have NaN after
    them, and so have positions that are not drafted.
    """
    circuit = get_circuit(name, n, r)
    generator = torch.Generator().manual_seed(n * 1000 + r * 100 + vocab + batch)
    own = torch.Generator().manual_seed(token_rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    num_slots = batch + 3
    temperature = torch.rand(num_slots, generator=generator) + 0.3
    temperature[::3] = 0.0
    evidence, leaf, root = normal(batch, r) - 5, normal(batch, drafts, r, vocab), normal(batch, r)
    params = (evidence, leaf, root, normal(batch, circuit.num_inner, r, r))
    made = Case(
        circuit.program,
        (*params, torch.randint(vocab, (batch,), generator=own), None),
        torch.randperm(num_slots, generator=generator)[:batch],
        temperature,
        torch.randint(2**40, (num_slots,), generator=generator),
        torch.randint(2**31, (batch,), generator=generator),
        **options,
    )
    if token_rank:
        target = torch.full((drafts + 1, token_rank, vocab + 5), torch.nan)
        target[:drafts, :, :vocab] = torch.randn(drafts, token_rank, vocab, generator=own) * scale
        source = torch.randn(vocab, token_rank, generator=own) / token_rank**0.5
        made.params = (*made.params[:5], Bigram(source.to(dtype), target.to(dtype)[..., :vocab]))
    return made


def with_leaf(base: Case, leaf: Tensor) -> Case:
    evidence, _, *others = base.params
    return replace(base, params=(evidence, leaf, *others))


def with_holes(token_rank: int = 0) -> Case:
    """Tokens without mass in some components, in all of them, and a component that has one token alone."""
    base = case("hmm", 8, 7, 63, 3, 4, token_rank=token_rank)
    leaf = base.params[1].clone()
    leaf[..., ::2] = -INF
    leaf[:, 1, 3, 5:] = -INF
    leaf[:, 2, :, :60] = -INF
    leaf[:, 3, 2, 2:] = -INF
    return with_leaf(base, leaf)


def strided() -> Case:
    """bfloat16, a slice of more positions, with other numbers after every row."""
    base = case("cp", 8, 7, 63, 3, 4)
    leaf = torch.full((3, 6, 7, 70), 1e4, dtype=torch.bfloat16)
    leaf[:, 1:5, :, :63] = base.params[1].bfloat16()
    return with_leaf(base, leaf[:, 1:5, :, :63])


def padded(token_rank: int = 0) -> Case:
    """Rows -1, as in a dummy run or after the last request of a graph."""
    base = case("btree", 3, 2, 63, 3, 2, token_rank=token_rank)
    return replace(base, slots=torch.tensor([-1, 4, -1]))


def rounded(dtype: torch.dtype, batch: int = 32) -> Case:
    """Distributions in half precision, at low temperatures that amplify the rounding."""
    base = case("hmm", 5, 7, 63, batch, 4, scale=0.3)
    return replace(base, cache_dtype=dtype, temperature=base.temperature * 0.05)


def masked(base: Case) -> Case:
    """Half of the tokens are forbidden at random, and all but one at the second draft of the first request."""
    generator, (*_, leaf, root) = torch.Generator().manual_seed(5), base.params[:3]
    vocab_size = base.vocab_size
    drafts, words = leaf.shape[1] - (base.params[0] is None), -(-vocab_size // 32)
    allowed = torch.randint(-(2**31), 2**31, (len(root), drafts, words), dtype=torch.int32, generator=generator)
    allowed[0, 1] = 0
    allowed[0, 1, vocab_size // 64] = 1 << 3
    return replace(base, allowed=allowed)


def bits(allowed: Tensor, vocab_size: int) -> Tensor:
    """Return masks [..., V] bool of bitmasks [..., words]."""
    return (allowed[..., None] >> torch.arange(32) & 1).bool().flatten(-2)[..., :vocab_size]


def with_first(base: Case, rank: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    """The kernel computes the evidence of x_1, and components of a rank by their differences from common logits."""
    _, leaf, *others = base.params
    batch, drafts, r, vocab_size = leaf.shape
    generator = torch.Generator().manual_seed(rank)
    scale = leaf[..., :5].float().std()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    low, given = None, torch.cat([normal(batch, 1, r, vocab_size), leaf], 1)
    if rank:
        out = torch.full((drafts + 2, rank, vocab_size + 5), torch.nan)
        out[: drafts + 1, :, :vocab_size] = normal(drafts + 1, rank, vocab_size)
        given = normal(batch, drafts + 1, 1, vocab_size).to(dtype)
        differences = torch.randn(drafts + 1, batch, r, rank, generator=generator).transpose(0, 1) / rank**0.5
        low = LowRank(differences.to(dtype), out.to(dtype)[: drafts + 1, :, :vocab_size])
    return replace(base, params=(None, given, *others, low), one_launch=False)


def with_ids(base: Case) -> Case:
    """The columns are those of one in four tokens at random, the fourth at every eighth, as `masked` allows one."""
    _, leaf, _, _, _, bigram, *_ = base.params
    generator, vocab_size = torch.Generator().manual_seed(3), 4 * leaf.shape[3] + 3
    ids = 4 * torch.arange(leaf.shape[3]) + torch.randint(4, (leaf.shape[3],), generator=generator)
    ids[::8] = torch.arange(3, vocab_size - 3, 32)
    first = torch.randint(vocab_size, (len(leaf),), generator=generator)
    if bigram is not None:
        source = torch.randn(vocab_size, bigram.source.shape[1], generator=generator) / bigram.source.shape[1] ** 0.5
        bigram = bigram._replace(source=source.to(bigram.source.dtype))
    return replace(base, params=(*base.params[:4], first, bigram, *base.params[6:]), ids=ids, num_tokens=vocab_size)


def with_components(base: Case) -> Case:
    """Components of low rank after the evidence of x_1, as a draft vocabulary has them."""
    made, drafts = with_first(base, 16), base.params[1].shape[1]
    _, given, *others, low = made.params
    return replace(made, params=(base.params[0], given[:, 1 : drafts + 1], *others, low.positions(1)))


def spread(x: Tensor, asked: Case, fill: float) -> Tensor:
    """Return columns [..., Vd] as [..., V], `fill` elsewhere."""
    return x if asked.ids is None else x.new_full((*x.shape[:-1], asked.vocab_size), fill).index_copy(-1, asked.ids, x)


def whole(asked: Case) -> Case:
    """The same circuit over all V tokens, of which those without a column have no mass."""
    evidence, leaf, *others, bigram, low = (*asked.params, None)[:7]
    bigram = bigram and bigram._replace(target=spread(bigram.target, asked, 0.0))
    low = low and LowRank(low.low, spread(low.out, asked, 0.0))
    return replace(asked, params=(evidence, spread(leaf, asked, -INF), *others, bigram, low), ids=None)


def on_both_paths(name: str, base: Case) -> dict[str, Case]:
    return {name: replace(base, one_launch=True), f"{name}, blocks": replace(base, one_launch=False)}


BLOCKS = case("btree", 8, 32, 700, 2, 3)  # three blocks of 256 tokens, or six of 128
CASES: dict[str, Case] = {
    "btree 16": case("btree", 16, 8, 63, 1, 15),
    "hmm 15": case("hmm", 15, 7, 320, 3, 4),
    "cp 8": case("cp", 8, 32, 320, 1, 7),
    "cp 8, peaked": case("cp", 8, 2, 320, 3, 3, scale=20.0),
    "batch of 64": case("ff", 3, 1, 5, 64, 2),
    "two tokens": case("hmm", 2, 2, 5, 3, 1),
    "large": case("btree", 3, 2, 32_000, 1, 2),
    "large, one component": case("ff", 3, 1, 32_000, 3, 2),
    **on_both_paths("several blocks", BLOCKS),
    "one block, several launches": case("hmm", 8, 7, 63, 2, 4, one_launch=False),
    **on_both_paths("float64 noise", case("cp", 5, 32, 200, 1, 2, use_fp64=True)),
    **on_both_paths("no draws", case("hmm", 8, 32, 200, 3, 2, draw=False)),
    **on_both_paths("holes", with_holes()),
    "one-hot": with_leaf(
        case("btree", 8, 8, 320, 2, 3), torch.zeros(2, 3, 8, 320).log().index_fill(3, torch.tensor(9), 3.0)
    ),
    "flat": with_leaf(case("btree", 8, 8, 63, 3, 3), torch.zeros(3, 3, 8, 63)),
    **on_both_paths("strided", strided()),
    **on_both_paths("bfloat16 cache", rounded(torch.bfloat16)),
    "float16 cache": rounded(torch.float16, 100),
    **on_both_paths("padded", padded()),
    # leaves that look at the token before: all circuits, ranks that fill no block or several
    **on_both_paths("token, ff", case("ff", 8, 1, 63, 18, 7, token_rank=1)),
    **on_both_paths("token, cp", case("cp", 5, 7, 320, 3, 4, token_rank=32, use_fp64=True)),
    **on_both_paths("token, hmm", case("hmm", 8, 8, 63, 3, 5, token_rank=67)),
    **on_both_paths("token, btree", case("btree", 8, 32, 700, 2, 3, token_rank=20)),
    **on_both_paths("token, bfloat16", case("hmm", 5, 7, 300, 2, 3, token_rank=16, dtype=torch.bfloat16)),
    **on_both_paths("token, no draws", case("hmm", 8, 7, 63, 3, 3, token_rank=4, draw=False)),
    **on_both_paths("token, holes", with_holes(token_rank=4)),
    **on_both_paths("token, padded", padded(token_rank=4)),
    **on_both_paths("token, one draft", case("btree", 4, 4, 63, 3, 1, token_rank=4)),
    **on_both_paths("masked", masked(case("btree", 8, 7, 320, 3, 4))),
    **on_both_paths("masked, bfloat16", masked(rounded(torch.bfloat16))),
    "masked, components": masked(with_first(case("cp", 5, 32, 320, 3, 4), 16)),
    "128 components": case("btree", 8, 128, 300, 2, 3),
    "leaves with x_1": with_first(BLOCKS),
    "leaves with x_1, tokens": with_first(case("hmm", 8, 7, 63, 18, 3, token_rank=4)),
    "components": with_first(case("btree", 8, 7, 300, 3, 4), 5),
    "components, padded": with_first(padded(), 16),
    "components, bfloat16": with_first(rounded(torch.bfloat16, 100), 67, torch.bfloat16),
    "components, tokens": with_first(case("cp", 5, 32, 320, 3, 4, token_rank=20), 16),
    "several blocks, all ids": replace(BLOCKS, ids=torch.arange(700), one_launch=True),
    "several blocks, blocks, all ids": replace(BLOCKS, ids=torch.arange(700), one_launch=False),
}
# columns of some tokens, and what they are of all
IDS: dict[str, Case] = {
    **on_both_paths("ids", masked(with_ids(case("btree", 8, 7, 160, 3, 4)))),
    **on_both_paths("ids, token", masked(with_ids(case("cp", 5, 7, 63, 5, 4, token_rank=20, use_fp64=True)))),
    **on_both_paths("ids, padded", with_ids(padded(token_rank=4))),
    "ids, components": masked(with_ids(with_components(case("hmm", 8, 7, 160, 3, 4, token_rank=20)))),
}
CASES |= IDS | {f"{name}, whole": whole(asked) for name, asked in IDS.items()}


@triton.jit
def noised_argmax(logits, keys, mask, seed, pos, temp, IS_DRAFTING: tl.constexpr, USE_FP64: tl.constexpr):
    """Made like vLLM's, by (seed, position, token), with its signature; a stream is in the position."""
    tl.static_assert(not IS_DRAFTING)
    if USE_FP64:
        logits = logits.to(tl.float64)
    if temp != 0.0:
        u = uniform_kernel(seed * 100003 + keys.to(tl.int64), (keys * 0).to(tl.int64) + pos) + 2.9802322387695312e-08
        noise = -tl.log(-tl.log(u))
        logits = tl.where(mask, logits / temp + noise, float("-inf"))
    return tl.max(logits, axis=0, return_indices=True)


@dataclass
class Drafts:
    tokens: Tensor  # [B, K]
    confidences: Tensor  # [B, K]
    cache: Tensor | None  # [slots, K, V]
    one_launch: bool


def draft_all(cases: dict[str, Case], device: str) -> dict[str, Drafts]:
    return {name: _draft(case, device) for name, case in cases.items()}


def _draft(case: Case, device: str) -> Drafts:
    from vllm_mtpc.kernels.draft.kernel import CircuitDrafter

    evidence, leaf, root, *_ = case.params
    num_drafts, vocab_size = leaf.shape[1] - (evidence is None), case.vocab_size
    ids = moved(case.ids, device)
    options = (noised_argmax, case.use_fp64, case.one_launch, ids)
    drafter = CircuitDrafter(case.program, root.shape[1], vocab_size, torch.device(device), *options)
    tokens = torch.full((len(root), num_drafts + 2), POISON, device=device)[:, :num_drafts]
    confidences = torch.full((len(root), num_drafts + 1), float("nan"), device=device)[:, :num_drafts]
    shape = (len(case.temperature), num_drafts + 1, vocab_size)
    cache = torch.full(shape, float("nan"), dtype=case.cache_dtype, device=device) if case.draw else None
    requests = {
        name: moved(getattr(case, name), device) for name in ("slots", "temperature", "seeds", "pos", "allowed")
    }
    written = {"tokens": tokens, "confidences": confidences, "cache": cache}
    drafter(*moved(case.params, device), **requests, **written, draw=case.draw)
    return Drafts(tokens.cpu(), confidences.cpu(), None if cache is None else cache.cpu(), drafter.one_launch)


torch.set_num_threads(1)

# float32 sums in another order, logarithms of another library: some units in the last place of log q, which is ~ -20
LOG_Q, CONFIDENCE = 2e-5, 1e-5
NOISED = 1e-3  # Gumbel noise -log(-log u) of u within 1e-4 of 1 or 0 amplifies a last place of u's logarithm
ALL = pytest.mark.parametrize("name", list(CASES))
ROUNDED = [name for name, asked in CASES.items() if asked.cache_dtype != torch.float32]


@pytest.fixture(scope="module", params=interpreted.INTERPRETERS)
def drafts(request: pytest.FixtureRequest) -> dict[str, Drafts]:
    return interpreted.launch(draft_all, CASES, request.param)


def conditionals(asked: Case, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """log q [B, K, V] along tokens [B, K], by the definition, rounded to `dtype`; float32."""
    found = []

    def follow(log_q: Tensor, k: int) -> Tensor:
        log_q = spread(log_q, asked, -INF)
        if asked.allowed is not None:
            log_q = log_q.masked_fill(~bits(asked.allowed[:, k], log_q.shape[1]), -INF)
        found.append(log_q)
        return tokens[:, k] if asked.ids is None else torch.searchsorted(asked.ids, tokens[:, k].contiguous())

    naive.draft(asked.program, *asked.params, pick=follow, dtype=dtype, ids=asked.ids)
    return torch.stack(found, dim=1)


def scored(asked: Case, got: Drafts) -> Tensor:
    """log q [B, K, V] that vLLM reads: by the definition, or where it is rounded the very numbers in the cache."""
    if asked.cache_dtype == torch.float32:
        return conditionals(asked, got.tokens)
    return got.cache[asked.slots, : got.tokens.shape[1]].float()


def noised(asked: Case, log_q: Tensor) -> Tensor:
    """log q [B, K, V] with the noise of the case's requests; padded rows and those without draws have none."""
    at = asked.slots.clamp(min=0)
    temperature = asked.temperature[at].masked_fill((asked.slots < 0) | (not asked.draw), 0.0)[:, None, None]
    keys = (asked.seeds[at][:, None] * 100003 + torch.arange(log_q.shape[2]))[:, None].expand(log_q.shape)
    pos = (asked.pos[:, None] + torch.arange(log_q.shape[1]))[..., None].expand(log_q.shape)
    u = uniform(keys.flatten(), pos.flatten()).view(log_q.shape) + 2.0**-25
    scaled = log_q / torch.where(temperature == 0, 1.0, temperature)
    return torch.where(temperature == 0, log_q, scaled - (-u.log()).log())


def confidence(log_q: Tensor, temperature: Tensor, draw: bool = True) -> Tensor:
    """Return [B], the probability that two draws are the same token, sum_v q_T(v)^2, or max_v q_T(v) of an argmax.

    It is a function of the distribution alone: a length chosen by the drawn token would bias the output.

    Args:
        log_q: [B, V].
        temperature: [B]; 0: the draft is the argmax, and T = 1.
        draw: False: every draft is the argmax.
    """
    is_greedy = temperature == 0
    scaled = log_q / torch.where(is_greedy, 1.0, temperature)[:, None]
    probs = scaled.softmax(dim=-1)
    argmax = probs.amax(dim=-1)
    return torch.where(is_greedy, argmax, probs.square().sum(dim=-1)) if draw else argmax


@ALL
def test_conditionals_and_confidences(name: str, drafts: dict[str, Drafts]) -> None:
    asked, got = CASES[name], drafts[name]
    wanted, distribution, rows = conditionals(asked, got.tokens), scored(asked, got), asked.slots >= 0
    temperature = asked.temperature[asked.slots.clamp(min=0)].masked_fill(~rows, 0.0)
    for k in range(wanted.shape[1]):
        found = confidence(distribution[:, k], temperature, asked.draw)
        torch.testing.assert_close(got.confidences[:, k], found, atol=CONFIDENCE, rtol=0)
    if got.cache is not None:
        cached = got.cache[asked.slots[rows], : wanted.shape[1]]
        if asked.ids is not None:
            wanted = spread(wanted[..., asked.ids], asked, torch.nan)  # no other token is written
        # a half precision's last place: Triton's interpreter truncates to bfloat16 where a GPU rounds
        rtol = 1e-6 if asked.cache_dtype == torch.float32 else torch.finfo(asked.cache_dtype).eps
        torch.testing.assert_close(cached.float(), wanted[rows], atol=LOG_Q, rtol=rtol, equal_nan=True)
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


def test_both_paths_draft_the_same(drafts: dict[str, Drafts]) -> None:
    """Small leaves take one launch, large ones several; both draft the same."""
    assert drafts["cp 8"].one_launch and drafts["btree 16"].one_launch
    assert not drafts["large"].one_launch and not drafts["large, one component"].one_launch
    one, several = drafts["several blocks"], drafts["several blocks, blocks"]
    assert one.one_launch and not several.one_launch
    assert torch.equal(one.tokens, several.tokens)
    torch.testing.assert_close(one.cache, several.cache, atol=LOG_Q, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(one.confidences, several.confidences, atol=CONFIDENCE, rtol=0)


@pytest.mark.parametrize("name", list(IDS))
def test_draft_vocabulary_drafts_as_all_tokens_do(name: str, drafts: dict[str, Drafts]) -> None:
    """The noise is that of the target's tokens: sums in another order change log q, and no token here."""
    ids, own, over_all = IDS[name].ids, drafts[name], drafts[f"{name}, whole"]
    assert torch.equal(own.tokens, over_all.tokens)
    torch.testing.assert_close(own.cache[..., ids], over_all.cache[..., ids], atol=LOG_Q, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(own.confidences, over_all.confidences, atol=CONFIDENCE, rtol=0)


@pytest.mark.parametrize("name", ["several blocks", "several blocks, blocks"])
def test_draft_vocabulary_of_all_tokens_changes_no_bit(name: str, drafts: dict[str, Drafts]) -> None:
    own, over_all = drafts[f"{name}, all ids"], drafts[name]
    assert torch.equal(own.tokens, over_all.tokens) and torch.equal(own.confidences, over_all.confidences)
    assert torch.equal(own.cache.nan_to_num(7.0), over_all.cache.nan_to_num(7.0))


@pytest.mark.parametrize("name", ["ids", "ids, token"])
def test_fault_of_noise_keyed_by_column_is_found(name: str, drafts: dict[str, Drafts]) -> None:
    asked, got = CASES[name], drafts[name]
    distribution = scored(asked, got)
    values = noised(asked, distribution)
    injected = asked.ids[noised(asked, distribution[..., asked.ids]).argmax(dim=2)]
    assert (values.gather(2, injected[..., None])[..., 0] < values.amax(dim=2) - NOISED).any()


def test_confidence_equals_its_definition() -> None:
    distribution = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    temperature = torch.tensor([0.0, 0.5, 2.0])
    sharpened = torch.tensor([25.0, 9.0, 4.0]) / 38
    for draw, second in ((True, float(sharpened.square().sum())), (False, 25 / 38)):
        wanted = torch.tensor([0.5, second, 1.0])
        torch.testing.assert_close(confidence(distribution.log(), temperature, draw), wanted)
