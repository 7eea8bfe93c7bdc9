"""The tokenizer of the HTTP front: ``tokenizer.json`` by the `tokenizers` library, chat template beside it.

Special tokens are added as the file's post-processor says, as Hugging Face does. Thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvtier_worker.api.chat_template import ChatTemplate, load_chat_template
from kvtier_worker.errors import ConfigError


class TextTokenizer:
    """Text to ids and back.

    Args:
        tokenizer: the library's tokenizer.
        chat: template of chats; None = the model has none.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, chat: ChatTemplate | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.chat = chat
        decoders = set(_decoder_types(json.loads(tokenizer.to_str())["decoder"]))
        self._byte_level = "ByteLevel" in decoders
        self.byte_tokens = frozenset(self._byte_values) if "ByteFallback" in decoders else frozenset[int]()
        self.silent_tokens = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def load(cls, folder: str, chat_template: str = "") -> TextTokenizer:
        """Read a model folder.

        Args:
            folder: holds ``tokenizer.json`` and maybe ``tokenizer_config.json``, ``chat_template.jinja``.
            chat_template: a file to take instead of the folder's template.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"--model={folder}: tokenizer.json cannot be read: {error}"]) from error
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ConfigError([f"--model={folder}: tokenizer.json is malformed: {error}"]) from error
        return cls(tokenizer, load_chat_template(Path(folder), chat_template))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text.

        Only the library's batch calls release the interpreter lock: `encode` of some megabytes would stop every thread
        of the process, the engine's too, for seconds.
        """
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id without token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.byte_tokens:
            return bytes([self._byte_values[token_id]])
        if self._byte_level and all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return str(token).replace("\u2581", " ").encode()

    @cached_property
    def _byte_values(self) -> Mapping[int, int]:
        """Byte-fallback tokens ``<0x00>``…``<0xFF>`` and their bytes."""
        ids = {value: self._tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)}
        return {token_id: value for value, token_id in ids.items() if token_id is not None}


def _decoder_types(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder:
        yield decoder["type"]
        for inner in decoder.get("decoders", ()):
            yield from _decoder_types(inner)


def _byte_of_char() -> Mapping[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 for itself, the others from U+0100 on, in order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in plain]
    return {chr(value): value for value in plain} | {chr(256 + place): value for place, value in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
