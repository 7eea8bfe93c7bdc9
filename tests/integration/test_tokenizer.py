"""The front's tokenizer on the demo model's files: as Hugging Face's, and exact when streamed."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kvtier_worker.api.detokenizer import Detokenizer
from kvtier_worker.api.tokenizer import TextTokenizer
from kvtier_worker.model.prepare import default_folder, prepare
from transformers import AutoTokenizer

pytestmark = pytest.mark.model

CHAT = [
    {"role": "user", "content": "Hello <|im_end|> é 🙂"},
    {"role": "assistant", "content": " Hi.\n"},
    {"role": "user", "content": "  Bye"},
]


@pytest.fixture(scope="module")
def ours() -> TextTokenizer:
    return TextTokenizer.load(str(prepare(default_folder(os.environ))))


@pytest.fixture(scope="module")
def theirs(ours: TextTokenizer) -> Any:
    del ours  # prepared by then
    return AutoTokenizer.from_pretrained(default_folder(os.environ))


@given(text=st.text(min_size=1))
def test_texts_encode_as_hugging_faces(ours: TextTokenizer, theirs: Any, text: str) -> None:
    assert list(ours.encode(text)) == theirs(text)["input_ids"]


@pytest.mark.parametrize("messages", [CHAT, [{"role": "system", "content": "Be brief."}, *CHAT]])
@pytest.mark.parametrize("generate", [True, False])
def test_chats_render_as_hugging_faces(
    ours: TextTokenizer, theirs: Any, messages: list[dict[str, str]], generate: bool
) -> None:
    assert ours.chat is not None
    text = ours.chat.render(messages, {"add_generation_prompt": generate})
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=generate)
    assert list(ours.encode(text, add_special_tokens=False)) == list(expected["input_ids"])


@given(token_ids=st.lists(st.integers(0, 49151), max_size=40))
def test_streamed_pieces_of_any_tokens_add_up_to_the_whole(
    ours: TextTokenizer, theirs: Any, token_ids: list[int]
) -> None:
    detokenizer = Detokenizer(ours)
    pieces = [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]
    assert "".join(pieces) == theirs.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(text=st.text())
def test_streamed_pieces_of_any_text_are_the_text(ours: TextTokenizer, text: str) -> None:
    detokenizer = Detokenizer(ours)
    pieces = [*(detokenizer.push(token_id) for token_id in ours.encode(text)), detokenizer.flush()]
    assert "".join(pieces) == ours.decode(ours.encode(text))
    assume("".join(pieces) == text and "\ufffd" not in text)  # this vocabulary lacks a few bytes of rare characters
    assert not any("\ufffd" in piece for piece in pieces)


@given(text=st.text(min_size=1))
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(ours: TextTokenizer, text: str) -> None:
    assume(ours.decode(ours.encode(text)) == text)
    data = b"".join(ours.token_bytes(token_id) for token_id in ours.encode(text))
    assert data.decode() == text
