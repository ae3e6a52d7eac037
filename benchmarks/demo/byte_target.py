"""Byte-level targets that a CPU can train: the demo's own (scripts/train_demo.sh) and smaller ones, the defaults."""

import copy
import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.demo import corpus
from benchmarks.demo.round_heads import round_weights
from vllm_mtpc.checkpoint.save import package_versions
from vllm_mtpc.engine.provenance import commit
from vllm_mtpc.files import replace_file

EOS_TEXT = "<|endoftext|>"
SEED = 0
# Fixed counts, not a time limit: the seed and these decide the result. LONG_STEPS of the second half use windows of all
# positions that the model claims to serve; in the last steps alone, at falling rates, it does not learn them.
STEPS, LONG_STEPS = 1700, 150
SHORT, LONG, TOKENS_PER_STEP = 256, 1024, 2048
WARM_UP, COOL_DOWN = 100, 400
GRAD_CLIP = 1.0
AHEAD, AHEAD_WEIGHT = 7, 0.5  # further tokens that the last states predict, weight of their mean loss
LEARNING_RATE = 3e-3
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # products of this CPU
LAYERS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 8, 128, 1024
PRUNING_WINDOWS = 32  # short ones, by which neurons are chosen


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a target is trained.

    Attributes:
        steps: updates of the weights.
        long_steps: those on windows of all positions, see ``is_long``.
        short_window: tokens of the other windows.
        tokens_per_step: of all windows of a step.
        cool_down: the last steps, at falling rates.
        ahead_steps: the last steps in which the hidden states predict AHEAD further tokens as well, by layers that the
            result does not contain: the states carry what heads need.
        learning_rate: the highest.
    """

    steps: int = STEPS
    long_steps: int = LONG_STEPS
    short_window: int = SHORT
    tokens_per_step: int = TOKENS_PER_STEP
    cool_down: int = COOL_DOWN
    ahead_steps: int = 0
    learning_rate: float = LEARNING_RATE


def target_config(
    layers: int = LAYERS,
    intermediate_size: int = INTERMEDIATE_SIZE,
    hidden_size: int = HIDDEN_SIZE,
    positions: int = LONG,
) -> LlamaConfig:
    """Sizes of a target; by default about 3.7M parameters. vLLM's CPU attention has heads of 32 and 64 (not 48)."""
    head_dim = 32 if hidden_size <= 128 else 64
    heads = max(hidden_size // head_dim, 4 if hidden_size > 128 else 1)
    return LlamaConfig(
        vocab_size=corpus.VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=corpus.EOS,
        eos_token_id=corpus.EOS,
        dtype="float32",
    )


def byte_characters() -> list[str]:
    """The printable character that ByteLevel tokenizers use for each byte, in byte order."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(spare)) for byte in range(256)]


def build_tokenizer(positions: int = LONG) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the UTF-8 bytes, plus the end-of-text token 256."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS_TEXT, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS_TEXT,
        eos_token=EOS_TEXT,
        pad_token=EOS_TEXT,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def prune(teacher: PreTrainedModel, intermediate_size: int, tokens: torch.Tensor) -> PreTrainedModel:
    """A copy of ``teacher`` with ``intermediate_size`` neurons in each MLP. tokens: [B, T], to choose by.

    From the first layer to the last: the neurons that add most to the MLP's output stay, and the columns of
    ``down_proj`` that remain are solved anew by least squares, from the copy's activations to the output of the
    teacher's MLP on the same input.
    """
    model, kept_of = copy.deepcopy(teacher), []  # each MLP, the neurons that stay and their columns [I', H]

    def replace(mlp: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        state, down = inputs[0].flatten(0, -2), mlp.down_proj.weight  # [N, H], [H, I]
        neurons = mlp.act_fn(mlp.gate_proj(state)) * mlp.up_proj(state)  # [N, I]
        chosen = (neurons.square().mean(0) * down.square().sum(0)).topk(intermediate_size).indices.sort().values
        kept, wanted = neurons[:, chosen].double(), output.flatten(0, -2).double()
        damping = 1e-4 * kept.square().mean() * len(kept) * torch.eye(intermediate_size, dtype=kept.dtype)
        solved = torch.linalg.solve(kept.T @ kept + damping, kept.T @ wanted).float()  # [I', H]
        kept_of.append((mlp, chosen, solved))
        return (kept.float() @ solved).view_as(output)

    hooks = [layer.mlp.register_forward_hook(replace) for layer in model.model.layers]
    model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    for mlp, chosen, solved in kept_of:
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight, linear.out_features = nn.Parameter(linear.weight[chosen].clone()), intermediate_size
        mlp.down_proj.weight = nn.Parameter(solved.T.contiguous())
        mlp.intermediate_size = mlp.down_proj.in_features = intermediate_size
    model.config.intermediate_size = intermediate_size
    return model.requires_grad_().train()


def token_loss(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    ahead: nn.ModuleList | None = None,
    teacher: PreTrainedModel | None = None,
) -> torch.Tensor:
    """Mean next-token loss in nats. tokens: [B, T + 1].

    ``ahead``: linear layers that predict the tokens 2, 3, ... places ahead, AHEAD_WEIGHT of whose mean loss is added.
    ``teacher``: the next token's loss is the cross-entropy to its distribution in place of the text.
    """
    # bfloat16 matrix products are about three times faster than float32 ones on CPUs that have them, else far slower.
    with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
        found = model(input_ids=tokens[:, :-1], use_cache=False, output_hidden_states=ahead is not None)
        logits = [found.logits]  # [B, T, V]
        for k, layer in enumerate(ahead or [], 2):
            logits.append(layer(found.hidden_states[-1][:, : 1 - k]))
    wanted = [tokens[:, k:].flatten() for k in range(1, len(logits) + 1)]
    if teacher:
        with torch.no_grad():
            wanted[0] = teacher(input_ids=tokens[:, :-1], use_cache=False).logits.flatten(0, 1).softmax(-1)
    losses = [F.cross_entropy(some.float().flatten(0, 1), of) for some, of in zip(logits, wanted, strict=True)]
    return losses[0] + (AHEAD_WEIGHT * torch.stack(losses[1:]).mean() if ahead else 0)


def schedule(step: int, steps: int, cool_down: int = COOL_DOWN) -> float:
    """A factor of the peak learning rate: linear warm-up, constant, linear cool-down to zero.

    The number of steps only decides when the cool-down begins, so a longer training shares its beginning.
    """
    warm_up, cool_down = (max(1, min(longest, steps // 4)) for longest in (WARM_UP, cool_down))
    return min(1.0, (step + 1) / warm_up, (steps - step) / cool_down)


def build_optimizers(model: PreTrainedModel, rate: float = LEARNING_RATE) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest.

    With a budget of a few thousand steps Muon reaches the same loss in clearly fewer of them than AdamW alone. Its
    products are bfloat16: a CPU without them gets AdamW for all, and another model from the same seed.
    """
    if not HAS_BFLOAT16:
        return [torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05, fused=True)]
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    outer = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    return [
        torch.optim.Muon(inner, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train_step(
    model: PreTrainedModel,
    optimizers: list[torch.optim.Optimizer],
    tokens: torch.Tensor,
    factor: float,
    ahead: nn.ModuleList | None = None,
    teacher: PreTrainedModel | None = None,
) -> float:
    """One update on tokens[B, T + 1] at ``factor`` times the peak learning rates. Returns the ``token_loss``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor
    loss = token_loss(model, tokens, ahead, teacher)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def is_long(step: int, steps: int, long_steps: int) -> bool:
    """Whether a step uses long windows: ``long_steps`` of them, evenly spread over the second half."""
    half = steps // 2
    done, rest = step - half, steps - half
    return done >= 0 and (done + 1) * long_steps // rest > done * long_steps // rest


def load_state(file: Path, generator: torch.Generator, learns: list[Any]) -> int:
    """Restore what ``save_state`` wrote, in place; return the number of steps done."""
    kept = torch.load(file)
    generator.set_state(kept["generator"])
    for part, values in zip(learns, kept["learns"], strict=True):
        part.load_state_dict(values)
    return kept["step"]


def save_state(file: Path, step: int, generator: torch.Generator, learns: list[Any]) -> None:
    """Write a training's state after ``step`` steps; ``learns``: modules and optimizers."""
    new = file.with_name(f"{file.name}.new")
    values = [part.state_dict() for part in learns]
    torch.save({"step": step, "generator": generator.get_state(), "learns": values}, new)
    new.replace(file)


def train(
    text: corpus.Corpus,
    config: PretrainedConfig | None = None,
    recipe: Recipe | None = None,
    state: Path | None = None,
    teacher: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Trains from the fixed seed; the progress bar shows loss in nats, bits per byte and the time left.

    In the last ``ahead_steps`` both include the loss of the further tokens, see ``token_loss``. From ``teacher`` the
    model is pruned, and learns its distributions.
    With the file ``state`` an interrupted training goes on from its last 100 steps.
    """
    recipe = recipe or Recipe()
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    config = config or target_config()
    if teacher:
        read = corpus.crops(text.train, PRUNING_WINDOWS, recipe.short_window, generator)
        model = prune(teacher, config.intermediate_size, read)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rate, sizes = recipe.learning_rate, (model.config.hidden_size, model.config.vocab_size)
    optimizers = build_optimizers(model, rate)
    ahead = nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(AHEAD if recipe.ahead_steps else 0))
    if recipe.ahead_steps:
        optimizers.append(torch.optim.AdamW(ahead.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
    learns = [model, *optimizers, ahead]
    first = load_state(state, generator, learns) if state and state.exists() else 0
    steps = recipe.steps
    bar = tqdm(desc="target", unit="step", mininterval=5, total=steps, initial=first)
    for step in range(first, steps):
        longest = model.config.max_position_embeddings
        length = longest if is_long(step, steps, recipe.long_steps) else recipe.short_window
        windows = max(1, recipe.tokens_per_step // length)
        tokens = corpus.crops(text.train, windows, length + 1, generator)
        more = ahead if step >= steps - recipe.ahead_steps else None
        loss = train_step(model, optimizers, tokens, schedule(step, steps, recipe.cool_down), more, teacher)
        bar.set_postfix(loss=f"{loss:.3f}", bits=f"{loss / math.log(2):.3f}", refresh=False)
        bar.update()
        if state and (step + 1) % 100 == 0:
            save_state(state, step + 1, generator, learns)
    return model.eval()


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, part: corpus.Split, length: int = SHORT, at_most: int = 131072) -> float:
    """Bits per byte in float32 over windows of ``length``, spread evenly over ``part``, of ``at_most`` tokens in all.

    Every window starts without context, as training windows do, so this is an upper bound of what serving sees.
    """
    starts = torch.arange(0, len(part.tokens) - length - 1, length)
    windows = max(1, at_most // length)
    if windows < len(starts):
        starts = starts[torch.linspace(0, len(starts) - 1, windows).long()]
    total = 0.0
    for chunk in starts.split(max(1, 16384 // length)):
        tokens = part.tokens[chunk[:, None] + torch.arange(length + 1)].long().to(model.device)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
    return total / (len(starts) * length) / math.log(2)


def save(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, bits: int | None = None
) -> None:
    """Writes 16-bit weights, a config that says float32 (what users compute in) and the tokenizer (default: bytes).

    The weights are float16, or bfloat16 with ``bits`` significant bits, which a wheel compresses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if bits:
        for parameter in model.parameters():
            parameter.data = round_weights(parameter.data, bits)
    (model.bfloat16() if bits else model.half()).save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)  # written for the owner alone; a packaged file is for everyone
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], "float32"
    config.save_pretrained(folder)
    (tokenizer or build_tokenizer(config.max_position_embeddings)).save_pretrained(folder)


def load(folder: Path) -> PreTrainedModel:
    """Load the saved 16-bit weights in float32, as they are served and used to train heads."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model.requires_grad_(False)


def write_record(folder: Path, program: str, text: corpus.Corpus, **values: Any) -> dict[str, Any]:
    """Write the recipe and results of a target to provenance.json, and return them."""
    record = {
        "versions": package_versions(),
        "command": f"{program} {shlex.join(sys.argv[1:])}".rstrip(),
        "commit": commit(),
        "data": {**values.pop("data", {}), "files": text.files, "bytes": text.bytes, "sha256": text.sha256},
        "seed": SEED,
        **values,
    }
    replace_file(folder / "provenance.json", (json.dumps(record, indent=2) + "\n").encode())
    return record
