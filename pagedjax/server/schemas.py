"""The bodies of requests: OpenAI's fields, vLLM's extensions, and nothing else. A field that is not built is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class _Body(BaseModel):
    """No value is converted, and an unknown field is an error: a misspelt one must not pass for the default."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class StreamOptions(_Body):
    """What a stream has beside the answer."""

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="Accepted; no padding is sent.")


class _Sampling(_Body):
    """What both kinds of completion take. Ranges are checked where they are defined, in `pagedjax.SamplingParams`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # vLLM's extensions.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    prompt_logprobs: int | None = None
    # Say something about the caller and nothing about the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> _Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for a stream; set stream to true or leave them out")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs come with whole answers only; leave out stream, or prompt_logprobs")
        return self


class Message(BaseModel):
    """One message of a conversation; further fields are handed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[dict[str, Any]] | None = None


def _only_text(value: Any) -> Any:
    if value is not None and value != {"type": "text"}:
        raise ValueError("answers of a given form are not built; leave response_format out, or say {'type': 'text'}")
    return value


def _unforced(value: Any) -> Any:
    if value not in (None, "auto", "none"):
        raise ValueError("a forced tool choice is not built; use 'auto' or 'none'")
    return value


class ChatRequest(_Sampling):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, BeforeValidator(_unforced)] = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[Any, BeforeValidator(_only_text)] = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs need logprobs; set logprobs to true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same and differ; give one")
        return self


Prompts = str | list[str] | list[int] | list[list[int]]


def _prompts(value: Any) -> Any:
    """Checked here, in one sentence; a union of four types would complain four times."""
    kinds = (str, list) if not isinstance(value, list) else ()
    if isinstance(value, str):
        return value
    if kinds or not value:
        raise ValueError("it must be a text, a list of texts, a list of token ids or a list of those, and not empty")
    first = type(value[0])
    if first not in (str, int, list) or any(type(one) is not first for one in value):
        raise ValueError("its entries must be all texts, all token ids, or all lists of token ids")
    if first is list and any(type(i) is not int for one in value for i in one):
        raise ValueError("its lists must hold token ids, which are integers")
    return value


def _no_suffix(value: Any) -> Any:
    if value is not None:
        raise ValueError("text after the completion is not built; leave suffix out")
    return value


def _no_best_of(value: Any) -> Any:
    if value is not None:
        raise ValueError("choosing among more answers than are given is not built here; leave best_of out and use n")
    return value


class CompletionRequest(_Sampling):
    """The body of ``/v1/completions``."""

    prompt: Annotated[Prompts, BeforeValidator(_prompts)]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Annotated[Any, BeforeValidator(_no_suffix)] = None
    best_of: Annotated[Any, BeforeValidator(_no_best_of)] = None
    add_special_tokens: bool = True


class TokenizeRequest(_Body):
    """The body of ``/tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(None, description="By default true for a text and false for a conversation.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("it must have either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
