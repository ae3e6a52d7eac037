"""A byte-level Llama for vLLM: Llama, but the embedding of a token is

    x_t = E[id_t] + X[e_t],   e_t: the longest subword whose tokens are the last ones up to t (at most L of them)

Weights have the names of the published checkpoint (`model.expand_embed_tokens.weight` is X).
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.models.byte_llama.config import TABLE
from vllm_mtpc.models.byte_llama.context import TokenCache
from vllm_mtpc.models.byte_llama.suffixes import SuffixTable, read_table


class ByteLlamaForCausalLM(LlamaForCausalLM):
    """Differs from the parent by its input embedding alone, which is computed outside of the compiled model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, model = self.config, vllm_config.model_config
        entry = (get_hf_file_to_dict("config.json", model.model, model.revision) or {}).get(TABLE)
        subwords, short = read_table(entry)
        if max(subwords.values(), default=0) >= config.expand_input_ids_vocab_size:
            raise CheckpointError(f"{TABLE} names subwords beyond expand_input_ids_vocab_size; restore config.json")
        self.model.expand_embed_tokens = VocabParallelEmbedding(config.expand_input_ids_vocab_size, config.hidden_size)
        self.suffixes = SuffixTable(subwords, short, config.expand_input_ids_maxlen)
        # index 0 names a layer: vLLM sorts caches by the number in their name
        self.context = TokenCache(maybe_prefix(prefix, "model.layers.0.token_ids"), config.expand_input_ids_maxlen)
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        # CUDA graphs of the compiled model read their input where it was when they were captured
        self.inputs_embeds = torch.zeros(rows, config.hidden_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, D] of the ids of a step's rows, in the step's order."""
        embeds = self.model.embed_tokens(input_ids)
        context = self.context(input_ids)
        if context is None:
            return embeds
        known = len(context)  # vLLM may pad input_ids beyond its rows
        embeds[:known] += self.model.expand_embed_tokens(self.suffixes(context))
        return embeds

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        embeds = self.embed_input_ids(input_ids)
        held = self.inputs_embeds[: len(embeds)]
        held.copy_(embeds)
        return self.model(None, positions, intermediate_tensors, held)
