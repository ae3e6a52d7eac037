"""The figures of a head that has just been trained: expected tokens/step on the target's own held-out continuations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from vllm_mtpc.eval.acceptance import measure
from vllm_mtpc.eval.loading import check_length, prompts
from vllm_mtpc.eval.sampling import Sampling
from vllm_mtpc.eval.text import Samples, generate, with_draft_layers

if TYPE_CHECKING:
    from vllm_mtpc.heads.adapters import DraftLayers
    from vllm_mtpc.heads.base import Head
    from vllm_mtpc.target import Target
    from vllm_mtpc.train.data.documents import Documents
    from vllm_mtpc.train.options import TrainOptions

TEMPERATURES = {"t1": 1.0, "t0": 0.0}
SEEDS = {"t1": 101, "t0": 102}


def held_out_samples(options: TrainOptions, target: Target, documents: Documents) -> dict[str, Samples]:
    """Continuations of held-out prompts by the target, by temperature; none where the options ask for none."""
    count = options.evaluation_sequences
    if not count:
        return {}
    texts = prompts(documents, count, options.evaluation_prompt_tokens, options.seed)
    check_length(target, texts, options.evaluation_tokens + options.window, "--evaluation-tokens")
    samples = {}
    with tqdm(total=count * len(TEMPERATURES), desc="held-out continuations", unit="text") as bar:
        for name, temperature in TEMPERATURES.items():
            generator = torch.Generator(target.device).manual_seed(SEEDS[name])
            samples[name] = generate(
                target,
                texts,
                options.evaluation_tokens,
                Sampling(temperature),
                generator,
                overhang=options.window,
                progress=bar.update,
            )
    return samples


def figures_of(
    head: Head, target: Target, samples: dict[str, Samples], layers: DraftLayers | None = None
) -> dict[str, Any]:
    """Figures by temperature, as provenance.json holds them."""
    if head.needs_lm_head:
        head.bind_lm_head(target.logits)
    head, figures = head.to(target.device), {}
    for name, some in samples.items():
        read = some if layers is None else with_draft_layers(some, layers)
        figures[name] = measure(head, target, read, greedy=TEMPERATURES[name] == 0).as_dict()
    return figures
