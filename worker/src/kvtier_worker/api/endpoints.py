"""The generation endpoints: from a request body to the response that generates."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kvtier_worker.api.answers import ChatFormat, CompletionFormat, Extras
from kvtier_worker.api.front import Front, read_request_body
from kvtier_worker.api.generation import Generation, PromptJob
from kvtier_worker.api.problems import bad_request, json_response
from kvtier_worker.api.prompts import read_prompts, render_chat
from kvtier_worker.api.responses import GenerationResponse
from kvtier_worker.api.schema import ChatRequest, CompletionRequest, GenerationRequest, read_body

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


def generation_router(front: Front) -> APIRouter:
    """``/v1/completions`` and ``/v1/chat/completions``."""
    router = APIRouter(prefix="/v1")

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        arrived = front.clock()
        return await complete(front, await read_request_body(request), arrived)

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        arrived = front.clock()
        return await chat(front, await read_request_body(request), arrived)

    return router


async def complete(front: Front, body: bytes, arrived: float) -> Response:
    """Answer ``/v1/completions``; ``arrived`` is when the request came in, by the front's clock."""
    request = read_body(body, CompletionRequest)
    _check(front, request)
    jobs = []
    prompts = read_prompts(request.prompt)
    _check_number(front, len(prompts), request.n)
    for prompt in prompts:
        token_ids = await front.encode(prompt, add_special_tokens=True)
        limit = front.output_limit(len(token_ids), request.output_limit, _DEFAULT_COMPLETION_TOKENS, "prompt")
        jobs.append(PromptJob(token_ids, limit))
    extras = Extras(front.tokenizer, request.num_logprobs, request.return_token_ids)
    work = Generation(front, request, front.request_id("cmpl"), jobs, arrived)
    return GenerationResponse(front, request, work, CompletionFormat(extras), show_silent=extras.any)


async def chat(front: Front, body: bytes, arrived: float) -> Response:
    """Answer ``/v1/chat/completions``; ``arrived`` is when the request came in, by the front's clock."""
    request = read_body(body, ChatRequest)
    _check(front, request)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs", "only together with logprobs=true")
    options = request.chat_template_kwargs | {"add_generation_prompt": request.add_generation_prompt}
    text = render_chat(front.tokenizer, request.messages, options)
    token_ids = await front.encode(text, add_special_tokens=False, param="messages")
    limit = front.output_limit(len(token_ids), request.output_limit, None, "messages")
    extras = Extras(front.tokenizer, request.num_logprobs, request.return_token_ids)
    work = Generation(front, request, front.request_id("chatcmpl"), [PromptJob(token_ids, limit)], arrived)
    return GenerationResponse(front, request, work, ChatFormat(extras), show_silent=extras.any)


def _check(front: Front, request: GenerationRequest) -> None:
    front.check_model(request.model)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "only together with stream=true")
    front.extra_key(request.cache_salt)
    front.check_ready()


def _check_number(front: Front, prompts: int, choices: int) -> None:
    """Refuse what could never be taken whole, instead of saying "busy" for ever: the last prompt must find room."""
    limit = front.settings.max_concurrent_requests
    if (prompts - 1) * choices >= limit:
        number = f"{prompts} prompts" + (f" with n={choices}" if choices > 1 else "")
        raise bad_request("prompt", f"{number}; this server runs at most {limit} (--max_concurrent_requests)")


def model_router(front: Front) -> APIRouter:
    """``/v1/models``."""
    router = APIRouter()
    model = {"id": front.model_id, "object": "model", "created": int(front.now()), "owned_by": "kvtier"}

    def facts() -> dict[str, object]:
        ready = front.engine.health().ready
        return model | ({"max_model_len": front.engine.info.max_model_len} if ready else {})

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [facts()]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        front.check_model(name)
        return json_response(facts())

    return router
