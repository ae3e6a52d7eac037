"""The figures of a head that has just been trained: expected tokens/step on the target's own held-out continuations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_mtpc.eval.acceptance import measure
from vllm_mtpc.eval.loading import prompts
from vllm_mtpc.eval.sampling import Sampling
from vllm_mtpc.eval.text import Samples, generate, with_draft_layers
from vllm_mtpc.hf import check_length
from vllm_mtpc.progress import Bar

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.config.mtpc import HeadConfig
    from vllm_mtpc.data.documents import Documents
    from vllm_mtpc.heads.adapters import DraftLayers
    from vllm_mtpc.heads.base import Head
    from vllm_mtpc.hf import Target
    from vllm_mtpc.train.options import TrainOptions

TEMPERATURES = {"t1": 1.0, "t0": 0.0}
SEEDS = {"t1": 101, "t0": 102}


def held_out_prompts(options: TrainOptions, target: Target, documents: Documents) -> list[Tensor]:
    """Prompts (1-D) of held-out documents; none where the options ask for none. Raises UsageError.

    Asked for before training, so that what cannot be measured is said before anything is trained.
    """
    if not options.evaluation_sequences:
        return []
    texts = prompts(documents, options.evaluation_sequences, options.evaluation_prompt_tokens, options.seed)
    check_length(target, texts, options.evaluation_tokens + options.window, "--evaluation-tokens")
    return texts


def held_out_samples(options: TrainOptions, target: Target, texts: list[Tensor]) -> dict[str, Samples]:
    """Continuations of prompts by the target, by temperature; none without prompts."""
    samples: dict[str, Samples] = {}
    if not texts:
        return samples
    with Bar(total=len(texts) * len(TEMPERATURES), desc="held-out continuations", unit="text") as bar:
        for name, temperature in TEMPERATURES.items():
            samples[name] = generate(
                target,
                texts,
                options.evaluation_tokens,
                Sampling(temperature),
                torch.Generator(target.device).manual_seed(SEEDS[name]),
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


def served_lines(config: HeadConfig, target: Target, figures: dict[str, Any]) -> list[str]:
    """What default serving is expected to give on this machine, by requests at once: its schedule drafts less in larger
    batches. On Model Runner V1 the number of drafts follows what is observed, and this is where it starts."""
    from vllm_mtpc.proposers.config.schedule import as_served, default_schedule, load_of

    measured = {name: values["per_position"] for name, values in figures.items()}
    if not measured:
        return []
    is_cpu = target.device.type == "cpu"
    ranges = default_schedule(measured.values(), config.num_speculative_tokens, is_cpu, load_of(config, target.config))
    lines = []
    for name in measured:
        steps = [f"{as_served(measured, ranges, batch)[name]:.2f} at {batch}" for batch in (1, 4, 16, 64)]
        temperature = name.removeprefix("t")
        lines.append(f"as served by default, by requests at once, tokens/step at T={temperature}: {', '.join(steps)}")
    return lines
