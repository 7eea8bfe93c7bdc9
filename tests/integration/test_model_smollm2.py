"""The demo model: its preparation, its tokenizer, and our forward against `transformers` on the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.engine.messages import SamplingSpec, SequenceStep
from kvtier_worker.model.collective import SingleRank
from kvtier_worker.model.factory import build_runner, cache_dtype, cache_shape, kv_layout, load_config, load_decoder
from kvtier_worker.model.prepare import COMPLETE, prepare
from kvtier_worker.model.runner import PagedRunner
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CPU = torch.device("cpu")
BLOCK = 16
MARGIN = 1e-3
"""Smallest distance of the two best log-probabilities at which equal tokens are demanded."""

LOAD = """
import sys, torch
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.model.collective import SingleRank
from kvtier_worker.model.factory import load_config, load_decoder

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before = peak()
decoder = load_decoder(WorkerSettings(model=sys.argv[1], device="cpu"), load_config(sys.argv[1]), SingleRank())
print(peak() - before)
"""
"""Prints by how many KiB the peak of resident memory grows while a model is loaded."""

TEXTS = (
    "The capital of France is",
    "  two spaces, a\ttab\n\n\nand newlines \r\n",
    "In 2024, 1234567.89 people paid $3,000 for 7th-hand cars",
    "naïve café déjà-vu, 日本語のテキスト, русский, العربية, 한국어",
    "🙂👩‍👩‍👧‍👦 e\u0301 \u200b zero width \ufeff",
    "def f(x):\n    return {'a': x ** 2}  # it's 'quoted' isn't it",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "",
    " ",
    "a" * 300,
)


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@pytest.fixture(scope="module")
def runner(smollm2: Path) -> PagedRunner:
    settings = WorkerSettings(model=str(smollm2), device="cpu")
    config = load_config(smollm2)
    layout = kv_layout(config, 1, BLOCK, cache_dtype(settings, config, CPU))
    return build_runner(load_decoder(settings, config, SingleRank()), layout, torch.zeros(cache_shape(layout, 120)))


def test_the_prepared_folder_is_whole_and_readable_by_others(smollm2: Path) -> None:
    for name in COMPLETE:
        assert (smollm2 / name).stat().st_mode & 0o444 == 0o444
    assert prepare(smollm2) == smollm2
    assert not list(smollm2.parent.glob(f".{smollm2.name}-*"))


def test_the_oracle_knows_the_capital_of_france(smollm2: Path, oracle: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    ids = oracle.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert "Paris" in tokenizer.decode(ids[0])


@pytest.mark.parametrize("text", TEXTS)
def test_our_tokenizer_file_gives_the_tokens_of_auto_tokenizer_and_the_text_back(smollm2: Path, text: str) -> None:
    plain, auto = Tokenizer.from_file(str(smollm2 / "tokenizer.json")), AutoTokenizer.from_pretrained(smollm2)
    ids = plain.encode(text, add_special_tokens=False).ids
    assert ids == auto(text, add_special_tokens=False)["input_ids"]
    assert plain.decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token_of_its_own(smollm2: Path) -> None:
    plain = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert [plain.decode([token]) for token in plain.encode("x1234").ids] == ["x", "1", "2", "3", "4"]


def test_the_chat_template_makes_the_models_own_markup(smollm2: Path) -> None:
    auto: Any = AutoTokenizer.from_pretrained(smollm2)
    text = auto.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert auto.eos_token == "<|im_end|>"


@pytest.mark.parametrize("text", TEXTS[:7])
def test_our_tokens_and_logprobs_are_the_oracles(smollm2: Path, oracle: Any, runner: PagedRunner, text: str) -> None:
    prompt = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text * 3).ids
    table = list(range(60, 1, -3)) + list(range(61, 100))
    sampling = SamplingSpec(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, 0, 2)
    cut = len(prompt) // 3
    outputs = list(runner.forward([SequenceStep("r", prompt[:cut], 0, table, sample=False)], None)) if cut else []
    tokens, start = prompt[cut:], cut
    for _ in range(20):
        outputs.extend(runner.forward([SequenceStep("r", tokens, start, table, sample=True, sampling=sampling)], None))
        start += len(tokens)
        tokens = [outputs[-1].token_id]
    ids = [output.token_id for output in outputs]
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    best = logprobs.topk(2)
    for place, output in enumerate(outputs):
        assert output.logprob == pytest.approx(float(logprobs[place, output.token_id]), abs=1e-3)
        if float(best.values[place, 0] - best.values[place, 1]) > MARGIN:
            assert output.token_id == int(best.indices[place, 0])


def test_a_loaded_model_is_resident_once(smollm2: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(smollm2)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    grown = int(run.stdout) * 1024
    weights = (smollm2 / "model.safetensors").stat().st_size
    largest_tensor = 49152 * 576 * 4
    assert 0.9 * weights < grown < weights + 1.5 * largest_tensor
