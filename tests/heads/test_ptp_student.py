"""The student of a PTP head: rows of u equal PEFT's adapted model after the plain target's prefix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from vllm_mtpc.checkpoint.ptp_head import load_student, save_ptp
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.adapters import MODULES
from vllm_mtpc.heads.ptp.layers import PtpHead
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.hf import Target, load_target

torch.set_num_threads(1)
V, LAYERS, N = 32, 5, 4
TOKENS = torch.randint(V, (3, 12), generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 4 + [1] * 6 + [-1] * 2, [0] * 12])
# Windows of several rows and documents, two of them at one place, the third packed row unused.
ROW, START = torch.tensor([1, 0, 0, 1, 0, 0]), torch.tensor([6, 3, 10, 0, 3, 5])
UNEVEN = torch.tensor([1, 0, 0, 2, 0, 0])  # rows of which each window has a copy


def student_of(target: Target, std: float = 0.2, **changes: object) -> Student:
    """A student with adapters as training would leave them: not zero."""
    options = {"variant": "o-ptp", "window": N, "verifier": "t", "lora_rank": 3, "lora_alpha": 6} | changes
    torch.manual_seed(1)
    student = Student(target, PtpConfig.create(target=target.config, **options))
    generator = torch.Generator().manual_seed(2)
    for value in student.parameters():
        value.data.copy_(torch.randn(value.shape, generator=generator) * std)
    return student


def numbers(count: int, seed: int = 3) -> torch.Tensor:
    return torch.rand(count, N, generator=torch.Generator().manual_seed(seed))


def reference(folder: Path, student: Student, row: int, start: int, u: torch.Tensor) -> torch.Tensor:
    """[n, D]: PEFT's model reads the document with adapters off, then the rows of u one by one with adapters on."""
    model = load_target(folder, student.target.dtype, attention="torch").model
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=list(MODULES), task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    named = {name.replace(".weight", ".default.weight"): value for name, value in student.lora().items()}
    assert not model.load_state_dict(named, strict=False).unexpected_keys
    same = (DOCUMENTS[row] == DOCUMENTS[row, start]) & (torch.arange(DOCUMENTS.shape[1]) <= start)
    tokens = TOKENS[row][same][None]
    with torch.no_grad():
        with model.disable_adapter():
            cache = model.base_model.model.model(tokens, use_cache=True).past_key_values
        first = tokens.shape[1] - 1 + (student.config.variant == "c-ptp")
        states = []
        for j in range(len(u)):
            out = model.base_model.model.model(
                inputs_embeds=student.layers(u[j])[None, None].to(model.dtype),
                position_ids=torch.tensor([[first + j]]),
                past_key_values=cache,
                use_cache=True,
            )
            states.append(out.last_hidden_state[0, 0])
    return torch.stack(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize(("variant", "row"), [("o-ptp", ROW), ("c-ptp", ROW), ("o-ptp", UNEVEN)])
def test_windows_are_what_peft_computes_one_by_one(
    folder: Path, variant: str, row: torch.Tensor, dtype: torch.dtype
) -> None:
    target = load_target(folder, dtype, attention="torch")
    student, u = student_of(target, variant=variant), numbers(len(ROW))
    states = student.aux(student.prefix(TOKENS, DOCUMENTS), row, START, u)
    assert states.shape == (len(ROW), N, 32)
    allowed = 1e-4 if dtype == torch.float32 else 0.1
    for window in range(len(ROW)):
        wanted = reference(folder, student, int(row[window]), int(START[window]), u[window])
        far = (states[window] - wanted).float().norm() / wanted.float().norm()
        assert far < allowed, (window, far)


def test_gradients_reach_adapters_and_embedding_alone(target: Target) -> None:
    student = student_of(target)
    states = student.aux(student.prefix(TOKENS, DOCUMENTS), ROW, START, numbers(len(ROW)))
    student.logits(states).log_softmax(-1)[..., 0].sum().backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in student.parameters())
    assert not any(value.requires_grad for value in target.model.parameters())
    lora = LAYERS * len(MODULES) * 2
    assert len(student.lora()) == lora and len(list(student.parameters())) == lora + 2


def test_a_new_student_starts_as_the_target(target: Target) -> None:
    """With B = 0 a row whose embedding is a token's gives the state of the target at that token's position."""
    config = PtpConfig.create(variant="c-ptp", window=N, target=target.config, verifier="t")
    student = Student(target, config)
    table = target.backbone.get_input_embeddings().weight
    assert 0.5 < student.layers(torch.arange(256) / 256).std() / table.std() < 2
    prefix = student.prefix(TOKENS)
    student.layers.forward = lambda u: table[TOKENS[:2, 5:9]]  # type: ignore[method-assign]
    states = student.aux(prefix, torch.tensor([0, 1]), torch.tensor([4, 4]), numbers(2))
    torch.testing.assert_close(states, prefix.hidden[:2, 5:9], rtol=1e-4, atol=1e-4)


def test_uninformed_student_ignores_u(target: Target) -> None:
    student = student_of(target, variant="independent")
    prefix = student.prefix(TOKENS, DOCUMENTS)
    one, other = (student.aux(prefix, ROW, START, numbers(len(ROW), seed)) for seed in (3, 4))
    assert torch.equal(one, other)
    informed = student_of(target)
    assert torch.equal(one, informed.aux(prefix, ROW, START, torch.full_like(numbers(len(ROW)), 0.5)))


def test_loaded_student_equals_the_saved_one(target: Target, folder: Path, tmp_path: Path, make_target) -> None:
    student = student_of(target)
    head = PtpHead(student.config, student.lora(), student.layers)
    save_ptp(tmp_path, head, {}, "card", torch.float32)
    loaded = load_student(tmp_path, target)
    prefix, u = student.prefix(TOKENS, DOCUMENTS), numbers(len(ROW))
    assert torch.equal(loaded.aux(prefix, ROW, START, u), student.aux(prefix, ROW, START, u))
    assert not any(value.requires_grad for value in loaded.parameters())
    assert PeftModel.from_pretrained(load_target(folder).model, tmp_path).active_adapter == "default"
    shorter = load_target(make_target(tmp_path / "shorter", "llama", num_hidden_layers=LAYERS - 1), attention="torch")
    with pytest.raises(HeadConfigError, match="not those of the layers of"):
        load_student(tmp_path, shorter)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2", "gemma"])
def test_targets_are_read_bit_for_bit(tmp_path: Path, make_target, model_type: str) -> None:
    target = load_target(make_target(tmp_path, model_type), attention="torch")
    student = student_of(target)
    prefix = student.prefix(TOKENS, DOCUMENTS)
    assert torch.equal(prefix.hidden, target.hidden(TOKENS, DOCUMENTS))
    row, start = torch.tensor([0, 0, 2]), torch.tensor([0, 7, 5])
    at = start[:, None] + 1 + torch.arange(4)
    states = student.plain(prefix, row, start, TOKENS[row[:, None], at])
    torch.testing.assert_close(states, prefix.hidden[row[:, None], at], rtol=1e-3, atol=1e-3)
