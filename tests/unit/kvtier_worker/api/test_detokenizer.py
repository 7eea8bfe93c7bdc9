"""Pieces of text add up to the decoding of the whole, and none of them holds half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.api.detokenizer import Detokenizer
from kvtier_worker.api.tokenizer import TextTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog " * 3, "naïve café — “quoted” 你好 🙂 ½", "  indent\n\ttab"]


def byte_level() -> TextTokenizer:
    """As in Llama 3, Qwen, SmolLM2: every byte has a token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return TextTokenizer(tokenizer)


def byte_fallback() -> TextTokenizer:
    """As in Llama 2 and Mistral: words with a visible space, and byte tokens for what the vocabulary lacks."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{value:02X}>": 3 + value for value in range(256)}
    words = ["\u2581", "\u2581the", "\u2581fox", "fox", "a", "b", "é", "\u2581\u2581", "\n", "\ufffd"]
    vocab |= {word: 259 + place for place, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextTokenizer(tokenizer)


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])


def pieces(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@TOKENIZERS
@given(data=st.data())
def test_pieces_of_any_tokens_add_up_to_the_whole(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    size = 400 if tokenizer is BYTE_LEVEL else 269
    token_ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@TOKENIZERS
@given(text=st.text())
def test_pieces_of_any_text_hold_no_half_character(tokenizer: TextTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    shown = pieces(tokenizer, token_ids)
    assert "".join(shown) == tokenizer.decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


@given(st.text())
def test_byte_level_text_comes_back_unchanged(text: str) -> None:
    assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text))) == text


@TOKENIZERS
@given(data=st.data())
def test_no_piece_is_taken_back_by_what_follows(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    size = 400 if tokenizer is BYTE_LEVEL else 269
    token_ids = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    more = data.draw(st.lists(st.integers(0, size - 1), max_size=5))
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push(token_id) for token_id in token_ids)
    assert tokenizer.decode(token_ids + more).startswith(shown)


def test_a_character_of_four_bytes_comes_with_its_last_byte() -> None:
    letter = BYTE_LEVEL.encode("\U00010348")
    assert len(letter) == 4
    assert pieces(BYTE_LEVEL, [*BYTE_LEVEL.encode("a"), *letter]) == ["a", "", "", "", "\U00010348", ""]


def test_special_tokens_show_nothing_however_many_there_are() -> None:
    end = next(iter(sorted(BYTE_LEVEL.silent_tokens)))
    token_ids = [*BYTE_LEVEL.encode("fox"), *[end] * 1000, *BYTE_LEVEL.encode("dog")]
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == "foxdog"


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    lengths: list[int] = []

    class Counting:
        byte_tokens = frozenset[int]()
        silent_tokens = frozenset[int]()

        def decode(self, token_ids: Sequence[int]) -> str:
            lengths.append(len(token_ids))
            return BYTE_LEVEL.decode(token_ids)

    detokenizer = Detokenizer(Counting())
    for token_id in BYTE_LEVEL.encode("the quick brown fox " * 50):
        detokenizer.push(token_id)
    assert max(lengths) <= 8


@pytest.mark.parametrize(
    ("make", "text"),
    [(lambda: BYTE_LEVEL, " fox"), (lambda: BYTE_LEVEL, "\u00e9"), (lambda: BYTE_FALLBACK, "fox")],
)
def test_the_bytes_of_a_texts_tokens_are_the_texts_bytes(make: Callable[[], TextTokenizer], text: str) -> None:
    tokenizer = make()
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text))
    assert data.decode().lstrip() == text.lstrip()


def test_a_byte_token_stands_for_its_byte_and_an_unknown_id_for_nothing() -> None:
    assert BYTE_FALLBACK.token_bytes(3 + 0xE4) == b"\xe4"
    assert BYTE_FALLBACK.token_text(3 + 0xE4) == "\ufffd"
    assert BYTE_LEVEL.token_bytes(99999) == b""
