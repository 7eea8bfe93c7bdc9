"""Chat templates: Jinja from the model's folder, run in a sandbox as Hugging Face runs it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtier_worker.api.problems import bad_request
from kvtier_worker.errors import ConfigError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """One compiled template and the special tokens it may name.

    Args:
        source: the template's text.
        special_tokens: values of ``bos_token``, ``eos_token``…

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError([f"--chat_template: the template does not compile: {error}; mend it"]) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt text of a conversation.

        Args:
            messages: role, content and the like, validated.
            options: further variables, e.g. ``add_generation_prompt``.

        Raises:
            ApiError: the template refuses these messages.
        """
        try:
            return self._template.render(messages=messages, **self._special_tokens, **options)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise bad_request("messages", f"the model's chat template refuses them: {error}") from error


def load_chat_template(folder: Path, override: str = "") -> ChatTemplate | None:
    """The template of a model folder, or of the file ``override``; None when there is none.

    Looks at ``chat_template.jinja``, then ``tokenizer_config.json``.

    Raises:
        ConfigError: the file cannot be read or does not compile.
    """
    config = _read_config(folder / "tokenizer_config.json")
    tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name)))}
    own = folder / "chat_template.jinja"
    if override:
        source = _read_text(Path(override))
    elif own.is_file():
        source = _read_text(own)
    else:
        source = _template_of(config)
    return ChatTemplate(source, tokens) if source else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [f"--chat_template={path}: cannot be read ({error}); give a text file with a template"]
        ) from error


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"--model={path.parent}: tokenizer_config.json cannot be read: {error}"]) from error
    return config if isinstance(config, dict) else {}


def _template_of(config: Mapping[str, Any]) -> str:
    template = config.get("chat_template", "")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template", "") for entry in template}
        template = named.get("default", "")
    return template if isinstance(template, str) else ""


def _token_text(token: object) -> str:
    """A special token is a text, or a record with its text in ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; models were trained without."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now(tz=dt.UTC).strftime(pattern)
