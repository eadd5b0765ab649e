"""From a body's text, token ids or conversation to what the model reads. Nothing here opens a file or an address."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Protocol

from pagedjax.errors import RequestError
from pagedjax.server.schemas import Message, Prompts
from pagedjax.text import Tokenizer

# What `Tokenizer.apply_chat_template` takes itself: a client must not reach these through the template's variables.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What the model reads, and what messages call it."""

    token_ids: list[int]
    name: str
    text: str | None


class Conversation(Protocol):
    """The fields of a body that make a prompt of messages."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None


def of_completion(tokenizer: Tokenizer, prompt: Prompts, add_special_tokens: bool) -> list[Prompt]:
    """One `Prompt` for each text or list of ids.

    Raises:
      RequestError: a text that is none.
    """
    if isinstance(prompt, str):
        return [Prompt(tokenizer.encode(prompt, add_special_tokens), "prompt", prompt)]
    if isinstance(prompt[0], int):
        return [Prompt(list(prompt), "prompt", None)]
    prompts = []
    for index, one in enumerate(prompt):
        name = f"prompt[{index}]" if len(prompt) > 1 else "prompt"
        if isinstance(one, str):
            prompts.append(Prompt(tokenizer.encode(one, add_special_tokens), name, one))
        else:
            prompts.append(Prompt(list(one), name, None))  # type: ignore[arg-type]
    return prompts


def of_conversation(tokenizer: Tokenizer, body: Conversation, add_special_tokens: bool = False) -> Prompt:
    """The prompt that the model's chat template makes.

    Raises:
      RequestError: content that is no text, or whatever the template refuses.
    """
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in _RESERVED:
            raise RequestError(f"chat_template_kwargs has {name!r}; that is no variable of the template's own")
    text = tokenizer.apply_chat_template(
        [_plain(message, f"messages[{index}]") for index, message in enumerate(body.messages)],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **variables,
    )
    return Prompt(tokenizer.encode(text, add_special_tokens), "the conversation", text)


def _plain(message: Message, name: str) -> dict[str, Any]:
    """A message as templates expect it: content as one text, arguments of tool calls as mappings."""
    given = message.model_dump()
    if isinstance(message.content, list):
        # Most templates take a text alone, and joining with line breaks is what vLLM does for those.
        given["content"] = "\n".join(_text(part, f"{name}.content[{index}]") for index, part in enumerate(message.content))
    if given.get("tool_calls") is not None:
        given["tool_calls"] = _tool_calls(given["tool_calls"], name)
    return given


def _text(part: dict[str, Any], name: str) -> str:
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text"):
        raise RequestError(f"{name} has the type {kind!r}; this server reads text alone, and opens no file and no address")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{name}.text is {part.get('text')!r}; it must be a text")
    return str(part["text"])


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls):
        raise RequestError(f"{name}.tool_calls is {calls!r}; it must be a list of {{'type': 'function', 'function': {{...}}}}")
    plain = []
    for index, call in enumerate(calls):
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise RequestError(f"{name}.tool_calls[{index}].function.arguments is not JSON: {error}") from None
        plain.append({**call, "function": function})
    return plain
