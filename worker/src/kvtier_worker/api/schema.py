"""The request bodies, field by field, with their ranges. Unknown fields are named, never ignored in silence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvtier_worker.api.problems import ApiError, bad_request, brief
from kvtier_worker.core.sampling import SamplingParams

_INT64 = 2**63 - 1
_MAX_LOGPROBS = 20
_MAX_STOPS = 16

Count = Annotated[int, Meta(ge=1, le=_INT64)]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chats have in common. A field given as null counts as not given."""

    model: str = ""
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=_INT64)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=_MAX_STOPS)] = []
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=1000)] = []
    ignore_eos: bool = False
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def output_limit(self) -> int | None:
        """Tokens the client asked for at most; None = it did not say."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each token; None = no log-probabilities at all."""
        return None

    def sampling(self, max_tokens: int, choice: int) -> SamplingParams:
        """Sampling of one choice. Choices of one seeded request differ by the seed."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed is None else self.seed + choice,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
        )


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt`` is read by `prompts.read_prompts`."""

    prompt: Any = None
    logprobs: Annotated[int, Meta(ge=0, le=_MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs``."""
        return self.logprobs


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``. ``messages`` are read by `prompts.read_messages`."""

    messages: Any = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=_MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def output_limit(self) -> int | None:
        """``max_completion_tokens``, or its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """``top_logprobs`` when ``logprobs``."""
        return (self.top_logprobs or 0) if self.logprobs else None


IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Fields of OpenAI's API that change nothing about the tokens: taken and not acted on."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
}
"""Fields that this version has no answer to, and the values that ask for nothing."""

Body = TypeVar("Body", bound=msgspec.Struct)


def read_body(body: bytes, kind: type[Body]) -> Body:
    """Decode and check a body.

    Raises:
        ApiError: 400 that names the field.
    """
    try:
        raw = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise bad_request(None, f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise bad_request(None, "the body is nested too deeply; no field needs more than a few levels") from error
    if not isinstance(raw, dict):
        raise bad_request(None, "the body must be a JSON object")
    known = kind.__struct_fields__
    given = {name: value for name, value in raw.items() if value is not None and name not in IGNORED}
    for name, value in given.items():
        if name not in known:
            _refuse_field(name, value, known)
    try:
        return msgspec.convert({name: value for name, value in given.items() if name in known}, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), raw) from error


def _refuse_field(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise unless the field is one of `UNSUPPORTED` with a value that asks for nothing."""
    if name in UNSUPPORTED:
        if value not in UNSUPPORTED[name]:
            raise bad_request(name, f"not supported by this version (given {_shown(value)}); leave it out")
        return
    name = brief(name)  # comparing one of megabytes takes seconds
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise bad_request(name, f"no such field{hint}", code="unknown_parameter")


_PLACE = re.compile(r"^(?P<problem>.*) - at `\$\.?(?P<path>.*)`$")


def _field_error(text: str, raw: Mapping[str, Any]) -> ApiError:
    match = _PLACE.match(text)
    if match is None:
        return bad_request(None, text)
    path = match["path"]
    problem = match["problem"][0].lower() + match["problem"][1:].replace("`", "")
    given = f" (given {_shown(raw[path])})" if path in raw else ""
    return bad_request(path or None, problem + given)


def _shown(value: object) -> str:
    return brief(repr(value))
