"""Decoding loops: greedy is the target's own text, sampled text has the target's distribution, counters add up."""

import itertools

import pytest
import torch
from scipy.stats import chi2

from tests.support.tiny import N, TableSession, TableTarget, V, llama_target, tiny_head
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval import acceptance as module
from vllm_mtpc.eval.acceptance import Rejection, verify
from vllm_mtpc.eval.decode import Decoded, decode
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.hf import Session

GREEDY = Sampling(0.0)
DRAWS, LENGTH = 4000, 3
PROMPT = torch.tensor([1, 2])


@pytest.mark.parametrize(("drafts", "sliding_window"), [(None, None), (1, None), (None, 6)])
def test_greedy_speculative_is_plain_decoding(drafts, sliding_window):
    """On a cached transformers model, rejected drafts are cropped in every step; also with a full sliding window."""
    target, head = (
        llama_target(seed=4, sliding_window=sliding_window),
        tiny_head("btree", hidden_size=32, vocab_size=32),
    )
    prompt = torch.tensor([3, 1, 4, 1, 5])
    plain = decode("stp", Session(target), prompt, Rejection(head, GREEDY), 60)
    fast = decode("speculative", Session(target), prompt, Rejection(head, GREEDY, num_drafts=drafts), 60)
    assert fast.tokens == plain.tokens
    assert fast.nats == pytest.approx(plain.nats, abs=1e-3)
    assert len(plain.tokens) == 60 and plain.steps == 59 and plain.tokens_per_step == 1.0
    assert min(fast.accepted) < fast.num_drafts  # some drafts were rejected and cropped
    reference, ids = [], prompt[None]
    for _ in range(60):
        ids = torch.cat([ids, target.model(ids).logits[:, -1:].argmax(-1)], 1)
        reference.append(int(ids[0, -1]))
    assert plain.tokens == reference


def test_greedy_speculative_accepts_what_the_target_would_write():
    """A head that repeats the target's own greedy text is accepted in full; a stop token ends the text."""
    target = TableTarget()
    plain = decode("stp", TableSession(target), PROMPT, Rejection(tiny_head("hmm"), GREEDY), 40)
    stop = plain.tokens[5]
    first = plain.tokens.index(stop) + 1
    for mode in ("stp", "speculative"):
        drafting = Rejection(tiny_head("hmm"), GREEDY)
        ended = decode(mode, TableSession(target), PROMPT, drafting, 40, stops={stop})
        assert ended.tokens == plain.tokens[:first]


def distribution(target: TableTarget, sampling: Sampling) -> torch.Tensor:
    """Probability of every continuation of [1, 2] by LENGTH tokens, [V ** LENGTH]."""
    texts = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))
    states = target.states(torch.cat([torch.tensor([1, 2]).expand(len(texts), 2), texts], 1))[:, :LENGTH]
    return sampling.log_probs(target.logits(states)).gather(-1, texts[..., None])[..., 0].sum(1).exp()


def drawn(mode: str, target: TableTarget, sampling: Sampling, drafts: int | None = None) -> torch.Tensor:
    """Frequencies of the continuations, [V ** LENGTH]."""
    head, generator = tiny_head("btree"), torch.Generator().manual_seed(11)
    drafting, counts = Rejection(head, sampling, generator, drafts), torch.zeros(V**LENGTH)
    for _ in range(DRAWS):
        text = decode(mode, TableSession(target), PROMPT, drafting, LENGTH).tokens
        counts[text[0] * V * V + text[1] * V + text[2]] += 1
    return counts / DRAWS


def plausible(found: torch.Tensor, expected: torch.Tensor, draws: int) -> float:
    """Pearson's test: the probability that an exact sampler is this far off. 0 if it gave what has no probability."""
    if found[expected == 0].any():
        return 0.0
    found, expected = found[expected > 0].double(), expected[expected > 0].double()
    return float(chi2.sf(float(draws * ((found - expected) ** 2 / expected).sum()), len(found) - 1))


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, 0.8)], ids=["T1", "T0.6 top-p"])
def test_sampled_speculative_has_the_targets_distribution(sampling):
    target = TableTarget()
    expected = distribution(target, sampling)
    assert expected.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert plausible(drawn("speculative", target, sampling), expected, DRAWS) > 1e-3


def test_a_dropped_recovered_token_is_noticed(monkeypatch):
    """The fault of the paper's algorithm: the recovered token thrown away, the next x_1 drawn again."""

    def drop(log_p, log_q, drafts, sampling, generator=None):
        accepted, _ = verify(log_p, log_q, drafts, sampling, generator)
        again = log_p.exp().gather(1, accepted[:, None, None].expand(-1, 1, V))[:, 0]
        return accepted, torch.multinomial(again, 1, generator=generator)[:, 0]

    monkeypatch.setattr(module, "verify", drop)
    target = TableTarget()
    expected = distribution(target, Sampling(1.0))
    assert plausible(drawn("speculative", target, Sampling(1.0)), expected, DRAWS) < 1e-9


def test_unverified_text_is_not_the_targets():
    """Mode mtp: x_1 has the target's distribution, the rest the circuit's; all K drafts are kept."""
    target = TableTarget()
    expected = distribution(target, Sampling(1.0))
    found = drawn("mtp", target, Sampling(1.0))
    assert plausible(found, expected, DRAWS) < 1e-9
    first, first_expected = found.view(V, -1).sum(1), expected.view(V, -1).sum(1)
    assert plausible(first, first_expected, DRAWS) > 1e-3


def test_verification_gives_the_targets_distribution_draft_by_draft():
    """200,000 rows at once: the first token out, and the second one where the first draft was accepted."""
    rows, generator = 200_000, torch.Generator().manual_seed(0)
    log_p, log_q = torch.randn(1, 3, V, generator=generator), torch.randn(1, 2, V, generator=generator)
    log_p, log_q = log_p.log_softmax(-1).expand(rows, -1, -1), log_q.log_softmax(-1).expand(rows, -1, -1)
    drafts = torch.stack([torch.multinomial(log_q[:, k].exp(), 1, generator=generator)[:, 0] for k in range(2)], 1)
    accepted, last = verify(log_p, log_q, drafts, Sampling(1.0), generator)
    out = torch.cat([drafts, last[:, None]], 1)
    out.scatter_(1, accepted[:, None], last[:, None])
    for k in range(3):
        reached = out[accepted >= k, k]
        found, expected = torch.bincount(reached, minlength=V) / len(reached), log_p[0, k].exp()
        assert plausible(found, expected, len(reached)) > 1e-3, k
    overlap = torch.minimum(log_p[0, 0], log_q[0, 0]).exp().sum().item()
    assert (accepted >= 1).double().mean().item() == pytest.approx(overlap, abs=0.005)  # 4.5 s.e. of 200,000 rows


def test_verification_of_equal_distributions_accepts_everything():
    log_p = torch.randn(50, 3, V).log_softmax(-1)
    drafts = log_p[:, :2].argmax(-1)
    accepted, last = verify(log_p, log_p[:, :2], drafts, Sampling(1.0))
    assert accepted.eq(2).all() and last.ge(0).all()


def test_counters_of_a_text():
    text = Decoded(tokens=[0] * 9, accepted=[3, 0, 1, 0], nats=[1.0] * 9, num_drafts=3, seconds=2.0)
    found = text.statistics()
    assert text.tokens_per_step == found["tokens_per_step"] == 2.0
    assert found["acceptance_per_position"] == [0.5, 0.25, 0.25]
    assert found["histogram"] == [0, 2, 1, 0, 1]
    assert found["tokens_per_second"] == 4.0 and found["seconds_per_call"] == 0.5


def test_mtp_keeps_every_draft():
    text = decode("mtp", TableSession(TableTarget()), PROMPT, Rejection(tiny_head("cp"), GREEDY), 21)
    assert text.tokens_per_step == N and text.accepted == [N - 1] * 5 and len(text.tokens) == 21


def test_padding_at_the_left_changes_nothing():
    target = llama_target()
    prompts = [torch.tensor([5, 6, 7, 8, 9]), torch.tensor([1, 2])]
    session = Session(target)
    states = session.start(prompts)
    more = session.read(torch.tensor([[3, 4], [3, 4]]))
    session.crop(1)
    again = session.read(torch.tensor([[4], [4]]))
    for row, prompt in enumerate(prompts):
        alone = target.backbone(torch.cat([prompt, torch.tensor([3, 4])])[None]).last_hidden_state[0]
        got = torch.cat([states[row, 5 - len(prompt) :], more[row]])
        torch.testing.assert_close(got, alone, atol=2e-5, rtol=1e-4)  # sums in another order
        torch.testing.assert_close(again[row, 0], alone[-1], atol=2e-5, rtol=1e-4)


def test_state_that_cannot_be_rolled_back_is_refused():
    target = llama_target()
    target.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UsageError, match="linear_attention"):
        Session(target)


def test_bad_requests_are_refused():
    with pytest.raises(UsageError, match="allowed are stp, mtp, speculative"):
        decode("fast", TableSession(TableTarget()), PROMPT, Rejection(tiny_head("cp"), GREEDY), 3)
    with pytest.raises(UsageError, match="a token or more"):
        Session(llama_target()).start([torch.tensor([], dtype=torch.long)])
    with pytest.raises(UsageError, match="temperature=-1"):
        Sampling(-1)
    with pytest.raises(UsageError, match="top_p=0"):
        Sampling(1.0, 0)


def test_top_p_keeps_the_likeliest_tokens():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = Sampling(1.0, 0.7).log_probs(logits).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    torch.testing.assert_close(Sampling(1.0, 1e-6).log_probs(logits).exp(), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
