"""The target's own continuations: the model's distribution and states, whatever the batch, ended where a server ends
them."""

import pytest
import torch

from tests.support.tiny import llama_target
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.text import Sampling, generate
from vllm_mtpc.hf import Session

PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7], [1], [2, 9, 9, 9, 30], [11, 12, 13])]


def reference(target, prompt: torch.Tensor, count: int) -> list[int]:
    ids = prompt[None]
    for _ in range(count):
        ids = torch.cat([ids, target.model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_greedy_text_and_its_states(batch):
    target = llama_target()
    samples = generate(target, PROMPTS, 12, Sampling(0.0), overhang=3, batch=batch)
    assert samples.tokens.shape == (4, 5 + 15) and samples.hidden.shape[:2] == (4, 19)
    assert samples.prompt_lengths.tolist() == [3, 1, 5, 3]
    assert samples.lengths.tolist() == [15, 13, 17, 15]
    for row, prompt in enumerate(PROMPTS):
        known = samples.tokens[row][samples.tokens[row] >= 0]
        assert known.tolist() == reference(target, prompt, 15)
        states = target.backbone(known[None, :-1]).last_hidden_state[0]
        torch.testing.assert_close(samples.hidden[row, : len(states)], states, atol=5e-5, rtol=1e-4)


def test_an_end_token_ends_a_text_but_not_its_overhang():
    free = llama_target()
    written = [reference(free, prompt, 15)[len(prompt) :] for prompt in PROMPTS]
    stop = written[0][4]
    target = llama_target(eos=stop)
    assert target.stop_ids == {stop}
    samples = generate(target, PROMPTS, 12, Sampling(0.0), overhang=3)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, written, strict=True)):
        expected = tokens.index(stop) + 1 if stop in tokens[:12] else 12
        assert samples.lengths[row] == len(prompt) + expected
        known = samples.tokens[row][samples.tokens[row] >= 0].tolist()
        assert known == prompt.tolist() + tokens[: expected + 3]
    assert samples.lengths[0] == 3 + written[0].index(stop) + 1
    assert (generate(target, PROMPTS, 12, Sampling(0.0), stops=set()).lengths == torch.tensor([15, 13, 17, 15])).all()
    ended = generate(free, PROMPTS[:1], 50, Sampling(0.0), stops={written[0][0]}, overhang=2)
    assert ended.lengths.tolist() == [4] and ended.tokens.shape == (1, 3 + 1 + 2)  # no further forward pass


def test_sampled_text_has_the_models_distribution_and_repeats_with_its_seed():
    """5,000 first tokens of one prompt at temperature 0.7 against the softmax; 3 s.e. of the likeliest token."""
    target, prompts = llama_target(), [PROMPTS[0]] * 5000

    def first_tokens(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate(target, prompts, 1, Sampling(0.7), generator, batch=5000).tokens[:, 3]

    tokens = first_tokens(0)
    assert torch.equal(tokens, first_tokens(0)) and not torch.equal(tokens, first_tokens(1))
    expected = (target.model(PROMPTS[0][None]).logits[0, -1] / 0.7).softmax(-1)
    found, top = torch.bincount(tokens, minlength=32) / 5000, int(expected.argmax())
    assert found[top].item() == pytest.approx(expected[top].item(), abs=3 * (expected[top] / 5000).sqrt().item())
    assert (found - expected).abs().sum() / 2 < 0.05


def test_target_with_recurrent_layers_is_refused():
    target = llama_target()
    target.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UsageError, match="linear_attention"):
        Session(target)
