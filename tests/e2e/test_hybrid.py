"""Targets with recurrent layers: vLLM's drafts change their text on CPUs, so heads are refused; they can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_targets import HYBRIDS, make_family
from tests.support import forks
from tests.support.engine import SMALL
from tests.support.models import make_tokenizer
from vllm_mtpc.cli import main

PROMPTS = [[(7 * number + place * place) % 41 + 1 for place in range(5 + number)] for number in range(16)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
GAP = 0.25  # nats between the first and the second token: rounding of bfloat16 decides below it


def answered(folder: Path, drafts: dict[str, Any] | None) -> list[tuple[list[int], list[float]]]:
    """In a fork: greedy tokens of an engine, and the gap between the two most likely ones of each."""
    from vllm import LLM, SamplingParams

    engine = SMALL | {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 27, "max_model_len": 96}
    llm = LLM(str(folder), speculative_config=drafts, skip_tokenizer_init=True, enable_prefix_caching=False, **engine)
    how = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    found = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], how, use_tqdm=False):
        best = [sorted((one.logprob for one in each.values()), reverse=True) for each in output.outputs[0].logprobs]
        found.append((list(output.outputs[0].token_ids), [first - second for first, second, *_ in best]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_drafts_of_plain_vllm_change_the_text_of_hybrids(tmp_path: Path, family: str) -> None:
    """The reason of the refusal; if this fails, vLLM keeps recurrent states, and heads may be served on them."""
    folder = make_family(family, tmp_path / "target")
    plain, again = (forks.call("v1", f"{__name__}:answered", folder, None) for _ in range(2))
    assert plain == again, "plain vLLM does not repeat its text"
    if family == "Qwen3Next":  # the engine ends: requests with other numbers of drafts are not foreseen
        with pytest.raises(RuntimeError, match="The size of tensor a"):
            forks.call("v1", f"{__name__}:answered", folder, NGRAM)
        return
    drafted = forks.call("v1", f"{__name__}:answered", folder, NGRAM)
    differing = []
    for (expected, gaps), (tokens, _) in zip(plain, drafted, strict=True):
        differing += [gap for one, other, gap in zip(expected, tokens, gaps, strict=True) if one != other][:1]
    assert max(differing, default=0) > GAP, f"first differing tokens at gaps of {sorted(differing)[-3:]} nats"


@pytest.mark.slow
def test_hybrid_is_trained_on_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = make_family("GraniteMoeHybrid", tmp_path / "target"), tmp_path / "head"
    make_tokenizer(target, 48)
    (tmp_path / "text.jsonl").write_text('{"text": "abcabdabcabcdefgabcabd"}\n' * 40)
    words = "train --circuit cp --window 4 --components 2 --max-steps 4 --windows-per-step 64 --seq-len 64 --device cpu"
    words += " --evaluation-sequences 4 --evaluation-tokens 16 --regenerate 40"
    given = ["--target", str(target), "--data", str(tmp_path / "text.jsonl"), "--out", str(out)]
    assert main([*words.split(), *given, "--engine", '{"max_model_len": 128}']) == 0
    shown = capsys.readouterr()
    assert "vLLM starts, for the states" in shown.err and "expected tokens/step at T=1" in shown.out
