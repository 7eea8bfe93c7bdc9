"""From the prompt or the messages of a request to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier_worker.api.problems import ApiError, bad_request
from kvtier_worker.api.tokenizer import TextTokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_call_id"})
_IGNORED_MESSAGE_FIELDS = frozenset({"refusal", "annotations"})
_MAX_PROMPTS = 2048

Prompt = str | tuple[int, ...]


def read_prompts(prompt: object) -> tuple[Prompt, ...]:
    """The prompts of a completion request: a text, token ids, or a list of either.

    Raises:
        ApiError: anything else; names the place.
    """
    if isinstance(prompt, str):
        return (_text(prompt, "prompt"),)
    if not isinstance(prompt, list):
        raise bad_request("prompt", "missing; give a text, a list of texts, token ids or a list of lists of token ids")
    if not prompt:
        raise bad_request("prompt", "an empty list; give at least one prompt")
    if _is_token(prompt[0]):
        return (_tokens(prompt, "prompt"),)
    if len(prompt) > _MAX_PROMPTS:
        raise bad_request("prompt", f"{len(prompt)} prompts; at most {_MAX_PROMPTS} in one request")
    return tuple(_one_of_list(entry, f"prompt[{place}]") for place, entry in enumerate(prompt))


def _one_of_list(entry: object, place: str) -> Prompt:
    if isinstance(entry, str):
        return _text(entry, place)
    if isinstance(entry, list):
        return _tokens(entry, place)
    raise _prompt_error(place, f"must be a text or a list of token ids, not {entry!r:.60}")


def _text(text: str, place: str) -> str:
    if not text:
        raise _prompt_error(place, "empty; give at least one token")
    return text


def _tokens(tokens: Sequence[object], place: str) -> tuple[int, ...]:
    if not tokens:
        raise _prompt_error(place, "empty; give at least one token")
    for position, token in enumerate(tokens):
        if not _is_token(token):
            raise _prompt_error(f"{place}[{position}]", f"must be a token id, not {token!r:.60}")
    return tuple(tokens)  # type: ignore[arg-type]  # all ints, checked above


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt_error(place: str, message: str) -> ApiError:
    return ApiError(400, f"{place}: {message}", param="prompt")


def check_vocabulary(prompt: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuse ids that the model does not have.

    Raises:
        ApiError: names the first one.
    """
    if min(prompt) >= 0 and max(prompt) < vocab_size:
        return
    position, token = next((place, token) for place, token in enumerate(prompt) if not 0 <= token < vocab_size)
    raise bad_request(param, f"token id {token} at position {position} is not in 0..{vocab_size - 1}")


def read_messages(messages: object) -> list[dict[str, Any]]:
    """The messages of a chat, contents flattened to text.

    Raises:
        ApiError: names the place.
    """
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages", "missing; give a list of at least one message with role and content")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(place, "must be an object with role and content")
    fields = {name: value for name, value in message.items() if value is not None}
    for name in fields:
        if name not in _MESSAGE_FIELDS | _IGNORED_MESSAGE_FIELDS:
            raise bad_request(f"{place}.{name}", "not supported by this version; leave it out")
    role = fields.get("role")
    if role not in _ROLES:
        raise bad_request(f"{place}.role", f"must be one of {', '.join(_ROLES)}, not {role!r:.60}")
    kept = {name: value for name, value in fields.items() if name in _MESSAGE_FIELDS}
    return kept | {"content": _content(fields.get("content"), f"{place}.content")}


def _content(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(place, "must be a text or a list of text parts")
    return "".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise bad_request(place, "must be an object with type and text")
    if part.get("type") != "text":
        raise bad_request(
            f"{place}.type", f"only text parts are supported by this version, not {part.get('type')!r:.60}"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{place}.text", "must be a text")
    return text


def render_chat(tokenizer: TextTokenizer, messages: object, options: Mapping[str, Any]) -> str:
    """The prompt text of a chat; its special tokens stand in it already.

    Raises:
        ApiError: malformed messages, or the model has no chat template.
    """
    if tokenizer.chat is None:
        raise bad_request(
            "messages", "this model has no chat template; use /v1/completions, or start with --chat_template=FILE"
        )
    text = tokenizer.chat.render(read_messages(messages), options)
    if not text:
        raise bad_request("messages", "the chat template makes an empty prompt of them")
    return text
