"""The paged runner on CUDA: what its return promises, whether or not a token is read."""

from __future__ import annotations

import pytest
import torch
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import DType
from kvtier_worker.engine.messages import SequenceStep
from kvtier_worker.model.collective import SingleRank
from kvtier_worker.model.config import parse_config
from kvtier_worker.model.factory import build_runner, cache_shape, kv_layout, load_decoder

pytestmark = pytest.mark.gpu
BLOCK, NUM_BLOCKS = 16, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class LateGate:
    """Keeps the device busy before a layer, as a restore under way does; the calling thread does not wait."""

    def wait(self, layer: int) -> None:
        if layer == 0:
            torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]


def test_a_chunk_that_does_not_sample_is_over_on_the_device_when_it_returns() -> None:
    device, config = torch.device("cuda", 0), parse_config(CONFIG)
    settings = WorkerSettings(load_format="dummy", dtype="float32", device="cuda", seed=3)
    decoder = load_decoder(settings, config, SingleRank(), device)
    layout = kv_layout(config, 1, BLOCK, DType.FLOAT32)
    runner = build_runner(decoder, layout, torch.zeros(cache_shape(layout, NUM_BLOCKS), device=device))
    chunk = SequenceStep("r", list(range(BLOCK)), 0, [1, 2], sample=False)
    for _ in range(2):  # the first one may wait for kernels that are built as they are needed
        assert runner.forward([chunk], LateGate()) == []
        assert torch.cuda.current_stream(device).query()
