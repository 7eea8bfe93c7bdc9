"""Three ranks as processes over gloo compute what one rank computes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 130,
    "hidden_size": 72,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
RANK = """
import json, sys, torch
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import DType
from kvtier_worker.engine.messages import SamplingSpec, SequenceStep
from kvtier_worker.mooncake_client.leaving import end_process
from kvtier_worker.model.factory import *
rank, size, address, folder, prompt = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], json.loads(sys.argv[5])
torch.set_num_threads(1)
collective = join_ranks(rank, size, address, torch.device("cpu"), timeout_s=60)
config = load_config(folder)
decoder = load_decoder(WorkerSettings(model=folder, load_format="dummy", device="cpu", seed=5), config, collective)
layout = kv_layout(config, size, 8, DType.FLOAT32)
runner = build_runner(decoder, layout, torch.zeros(cache_shape(layout, 12)))
sampling = SamplingSpec(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, 0, 3)
tokens, start, found = prompt, 0, []
for _ in range(8):
    outputs = runner.forward([SequenceStep("r", tokens, start, [3, 1, 2, 7, 5], True, sampling)], None)
    found.extend([output.token_id, output.logprob] for output in outputs)
    start += len(tokens)
    token = torch.tensor([outputs[0].token_id if outputs else 0])
    if size > 1:
        torch.distributed.broadcast(token, 0)
    tokens = token.tolist()
leave_ranks()
print(json.dumps(found))
end_process(0)  # as a worker does: gloo's threads may abort an interpreter that ends with them
"""


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run_ranks(folder: Path, size: int, prompt: list[int]) -> list[list[tuple[int, float]]]:
    address = free_address()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), address, str(folder), json.dumps(prompt)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(error for _, error in outputs)
    return [json.loads(text.splitlines()[-1]) for text, _ in outputs]


def test_three_gloo_processes_compute_what_one_process_computes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prompt = [(7 * i + 3) % 130 for i in range(29)]
    (alone,) = run_ranks(tmp_path, 1, prompt)
    first, *others = run_ranks(tmp_path, 3, prompt)
    assert others == [[], []]
    assert len(first) == 8
    for (token, logprob), (expected, expected_logprob) in zip(first, alone, strict=True):
        assert token == expected
        assert logprob == pytest.approx(expected_logprob, abs=1e-4)
