"""Everything but completions: models, health, figures, and the tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse

from pagedjax.server import prompts
from pagedjax.server.errors import ApiError
from pagedjax.server.schemas import DetokenizeRequest, TokenizeRequest
from pagedjax.server.service import Service, service_of
from pagedjax.server.strict_json import JsonRoute

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model under each of its names."""
    service = service_of(request)
    return {"object": "list", "data": [_card(service, name) for name in service.config.model_names]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    service = service_of(request)
    return _card(service, service.model(name))


def _card(service: Service, name: str) -> dict[str, Any]:
    owner = {"object": "model", "created": service.created, "owned_by": "pagedjax"}
    return {"id": name, **owner, "root": service.config.model_names[0], "parent": None, "max_model_len": service.llm.max_model_len}


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while answers are to be expected, 503 while the engine is stuck or has stopped. It never waits for the engine."""
    trouble = service_of(request).trouble
    return JSONResponse({"healthy": trouble is None, "reason": trouble}, 200 if trouble is None else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    service = service_of(request)
    return Response(service.metrics.render(await service.stats(), service.trouble is None), media_type=CONTENT_TYPE_LATEST)


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """The engine's figures as JSON, for the page and for people; `engine` is null while it is too busy to say."""
    service = service_of(request)
    figures = await service.stats()
    return {
        "engine": None if figures is None else dataclasses.asdict(figures),
        "max_num_seqs": service.llm.engine.engine_config.max_num_seqs,
        "num_kv_blocks": service.llm.engine.num_kv_blocks,
        "max_model_len": service.llm.max_model_len,
        "num_answers": service.admission.num_taken,
        "max_answers": service.admission.limit,
        "event_loop_lag_p99_s": service.metrics.lag_s(99),
    }


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the model would read it."""
    service = service_of(request)
    service.model(body.model)
    tokenizer = service.llm.tokenizer

    def ids() -> list[int]:
        if body.prompt is not None:
            return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        return prompts.of_conversation(tokenizer, body, bool(body.add_special_tokens)).token_ids  # type: ignore[arg-type]

    found = await service.off_loop(ids)
    spelled = [service.names(i)[0] for i in found] if body.return_token_strs else None
    return {"count": len(found), "max_model_len": service.llm.max_model_len, "tokens": found, "token_strs": spelled}


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    service.model(body.model)
    most = service.llm.config.vocab_size
    beyond = next((i for i in body.tokens if i >= most), None)
    if beyond is not None:
        raise ApiError(400, f"tokens has the id {beyond}; ids are 0 to {most - 1}", param="tokens")
    return {"prompt": await service.off_loop(lambda: service.llm.tokenizer.decode(body.tokens, skip_special_tokens=False))}
