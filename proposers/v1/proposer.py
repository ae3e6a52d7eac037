"""MtPC drafts on vLLM's V1 runner: those of `v2/speculator.py`, computed with PyTorch.

Unlike on Model Runner V2 a seeded request draws with its own generator (`verification.py`), and the draft
probabilities, which vLLM's rejection sampler receives, are normalised after temperature.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

from vllm_mtpc.kernels.draft import naive, probabilities
from vllm_mtpc.kernels.pick.naive import of_mass
from vllm_mtpc.proposers.options.request_options import max_drafts
from vllm_mtpc.proposers.worker.grammar_masks import Grammars
from vllm_mtpc.proposers.worker.load import load_served_head, log_drafts

GREEDY_BELOW = 1e-5  # vLLM's own threshold (v1/sample/sampler.py)


def draw_numbers(generator: torch.Generator, count: int) -> Tensor:
    """Return the numbers [count] of the next tokens, one draw each, as `TopKTopPSampler.forward_cpu` does."""
    return torch.randint(0, 2**31, (count,), generator=generator, dtype=torch.int64)


def peek_numbers(generator: torch.Generator, count: int) -> Tensor:
    """Return the same numbers and leave the generator as it is."""
    state = generator.get_state()
    numbers = draw_numbers(generator, count)
    generator.set_state(state)
    return numbers


def sample_tokens(logits: Tensor, numbers: Tensor) -> Tensor:
    """Return tokens [T] int64 of processed logits [T, V] float32, as vLLM samples them with these numbers [T]."""
    return torch.ops._C.fused_gumbel_argmax(logits.contiguous(), numbers)


def set_one_hot(probs: Tensor, rows: list[int], tokens: Tensor) -> None:
    """Make rows of probs [B, V] one-hot at tokens [B], in place.

    Drafts of structured requests that are not masked (grammar_masks.py) are the argmax, with probability 1: where
    vLLM prunes them then depends on nothing that was sampled, and the output distribution is unchanged.
    """
    if rows:
        probs[rows] = nn.functional.one_hot(tokens[rows], probs.shape[1]).to(probs.dtype)


def drafts_before_min_tokens(processors: Any) -> dict[int, int]:
    """Return, by row of the batch, the most drafts of a request that has not reached `min_tokens`.

    For the token after the last draft vLLM counts only the tokens before the step: a step that passes `min_tokens`
    could not end the text where plain vLLM could.
    """
    return {
        row: max(min_tokens - len(outputs) - 1, 0)
        for processor in processors.non_argmax_invariant
        if isinstance(processor, MinTokensLogitsProcessor)
        for row, (min_tokens, outputs, stops, *_) in processor.min_toks.items()
        if stops and len(outputs) < min_tokens
    }


def _pick_argmax(log_q: Tensor, k: int) -> Tensor:
    return log_q.argmax(dim=-1)


class MtpcProposer:
    """Proposer of a circuit head; buffers are allocated once."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        spec, self.vllm_config = vllm_config.speculative_config, vllm_config
        self.num_drafts, self.target_dtype = spec.num_speculative_tokens, vllm_config.model_config.dtype
        self.is_probabilistic = spec.draft_sample_method == "probabilistic"
        self.made: dict[str, int] = {}  # drafts by request that the scheduler received after the last step
        self.asked: dict[str, int] = {}  # by request that asked for fewer drafts than the engine makes
        self.pruned = Counter[str]()
        self.grammars = Grammars(vllm_config, is_masking=spec.mask_drafts)

    def load_model(self, target_model: nn.Module) -> None:
        spec, device = self.vllm_config.speculative_config, next(target_model.parameters()).device
        # reading leaf weights is most of a draft on a CPU; the conditionals are float32 in any case
        is_halved = device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        dtype = torch.bfloat16 if is_halved else self.target_dtype
        self.model = load_served_head(spec, dtype, device, target_model, self.target_dtype)
        shape = self.vllm_config.scheduler_config.max_num_seqs, self.num_drafts
        if self.is_probabilistic:
            self.draft_probs = torch.zeros(*shape, self.model.vocab_size, dtype=torch.float32, device=device)
        log_drafts(self.vllm_config, "NONE")

    def update_requests(self, scheduler_output: Any) -> None:
        """Add the requests that a step starts, and remove those that have ended."""
        for name in scheduler_output.finished_req_ids if self.asked else ():
            self.asked.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            self.grammars.start(new.req_id, new.sampling_params)
            if (asked := max_drafts(new.sampling_params, self.num_drafts)) < self.num_drafts:
                self.asked[new.req_id] = asked

    @torch.inference_mode()
    def propose(
        self,
        runner: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        sample_hidden_states: Tensor,
        spec_decode_metadata: Any,
        scheduler_output: Any,
    ) -> list[list[int]]:
        """Return drafts per request, [] for an unfinished prompt; the runner receives the draft probabilities.

        Args:
            sample_hidden_states: [num rows with logits, D].
            spec_decode_metadata: None for a step that verified nothing.
        """
        names, scheduled = runner.input_batch.req_ids, scheduler_output.num_spec_tokens_to_schedule
        runner._draft_probs = runner._draft_prob_req_ids = None
        made, self.made = self.made, {}
        limits, lengths = [self.num_drafts] * len(names), [scheduled] * len(names)
        if self.asked:
            limits = [self.asked.get(name, self.num_drafts) for name in names]
            lengths = [min(scheduled, limit) for limit in limits]
        num_drafts = max(lengths)
        self.pruned["request"] += self.num_drafts * len(names) - sum(limits)
        self.pruned["schedule"] += sum(limits) - sum(lengths)
        if not num_drafts and not made:
            return [[] for _ in names]
        emitted = [len(tokens) for tokens in sampled_token_ids]
        verified = [0] * len(emitted) if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        steps = zip(names, emitted, verified, strict=True)  # a request that was not scheduled for a step has no drafts
        self.pruned["budget"] += sum(made[name] - count for name, tokens, count in steps if tokens and name in made)
        if not num_drafts:
            return [[] for _ in names]
        num_rows = torch.tensor(verified) + 1  # [B], with logits
        last = num_rows.cumsum(0) - num_rows + torch.tensor(emitted).clamp(min=1) - 1  # [B], the last accepted ones
        hidden = sample_hidden_states[last]
        drafts, ends = self._generate_drafts(runner, sampled_token_ids, sampling_metadata, hidden, num_drafts)
        early = drafts_before_min_tokens(sampling_metadata.logitsprocs)
        for row, length in enumerate(lengths):
            length = min(length, ends.get(row, num_drafts), early.get(row, num_drafts))
            drafts[row] = drafts[row][:length] if emitted[row] else []
        self.made = {name: len(tokens) for name, tokens in zip(names, drafts, strict=True)}
        return drafts

    def _generate_drafts(
        self, runner: Any, sampled_token_ids: list[list[int]], sampling_metadata: Any, hidden: Tensor, num_drafts: int
    ) -> tuple[list[list[int]], dict[int, int]]:
        """Return K drafts of each request from hidden [B, D], and the drafts by row after which its grammar ends."""
        batch, names = len(sampled_token_ids), runner.input_batch.req_ids
        first = torch.tensor([tokens[-1] if tokens else 0 for tokens in sampled_token_ids], device=hidden.device)
        masks = self.grammars.masks(runner.requests, names, sampled_token_ids)
        params = self.model.draft_params(hidden, first, num_drafts)
        pick: naive.Pick = _pick_argmax
        if self.is_probabilistic and not sampling_metadata.all_greedy:
            # an unfinished prompt must not advance its request's generator
            seeds = {row: one for row, one in sampling_metadata.generators.items() if sampled_token_ids[row]}
            u = torch.rand(batch, num_drafts, dtype=torch.float64, device=hidden.device)
            pick = self._make_sampler(u, sampling_metadata.temperature, seeds, masks.unmasked, runner.couples)
            runner._draft_probs, runner._draft_prob_req_ids = self.draft_probs[:batch], names.copy()
        ids = self.model.vocabulary and self.model.vocabulary.ids
        draft = probabilities.draft if hidden.device.type == "cpu" else naive.draft
        drafts = draft(self.model.circuit.program, *params[:6], pick=masks.around(pick, ids), ids=ids).tolist()
        masks.rewind()
        return drafts, masks.lengths

    def _make_sampler(
        self, u: Tensor, temperature: Tensor, seeds: dict[int, torch.Generator], unmasked: list[int], couples: bool
    ) -> naive.Pick:
        """Return a function that samples draft k of all requests and stores its conditionals in draft_probs[:B, k].

        With a draft vocabulary it samples columns; the probabilities of other ids stay 0.

        Args:
            u, temperature: [B, K], uniform numbers, float64; [B].
            seeds, unmasked: generators by row; rows of structured requests whose grammar does not mask them.
            couples: whether requests with a seed take the numbers that the target's tokens will be sampled with.
        """
        is_greedy = temperature < GREEDY_BELOW
        is_greedy[unmasked] = True
        scale = torch.where(is_greedy, 1.0, temperature)[:, None]
        has_greedy, is_scaled = bool(is_greedy.any()), bool((scale != 1).any())  # read once, not per draft
        coupled, vocabulary = list(seeds) if couples else [], self.model.vocabulary
        if coupled:
            numbers = torch.stack([peek_numbers(seeds[row], u.shape[1]) for row in coupled])  # [S, K]
        else:
            for row, generator in seeds.items():
                u[row].uniform_(generator=generator)

        def pick(log_q: Tensor, k: int) -> Tensor:
            logits = log_q / scale if is_scaled else log_q
            stored = self.draft_probs[: len(u), k]  # [B, V]
            probs = torch.softmax(logits, dim=-1, out=None if vocabulary else stored)
            drafts = of_mass(probs, u[:, k])
            if coupled:
                own = logits[coupled]
                if vocabulary:  # the noise is that of the ids
                    own = stored.new_full((len(own), stored.shape[1]), -torch.inf).index_copy_(1, vocabulary.ids, own)
                tokens = sample_tokens(own, numbers[:, k])
                drafts[coupled] = vocabulary.columns[tokens] if vocabulary else tokens
            if has_greedy:
                drafts = torch.where(is_greedy, probs.argmax(dim=-1), drafts)
            set_one_hot(probs, unmasked, drafts)
            if vocabulary:
                stored[:, vocabulary.ids] = probs
            return drafts

        return pick
