"""Chat templates: a conversation to the text that a model was trained on.

Templates come with checkpoints, from strangers: they run in jinja2's immutable sandbox and see plain data only. The environment
is the one that templates are written for, `transformers.PreTrainedTokenizerBase.apply_chat_template`'s: blocks leave no line
breaks, `tojson` keeps characters as they are, and `raise_exception`, `strftime_now`, ``{% break %}`` and ``{% generation %}`` exist.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pagedjax.errors import CheckpointError, RequestError

Message = Mapping[str, Any]
"""One message of a conversation: ``{"role": "user", "content": "..."}`` and whatever else the template reads."""

# Ends the text of a message that is to be continued. The trailing space shows whether the template trims.
_MARK = "<!pagedjax-continue-here!> "

# What a template raises when the messages are not what it expects: its own complaint, or an operation on a missing or wrong value.
_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation.

    Args:
      template: jinja2 source.
      messages: at least one; a value of None counts as absent.
      tools: JSON schemas of the functions that the model may call.
      documents: texts for retrieval-augmented templates.
      add_generation_prompt: end with the header of the assistant's next message.
      continue_final_message: leave the last message open, so that the model goes on with it.
      variables: further names for the template.

    Raises:
      CheckpointError: the template is not valid jinja2.
      RequestError: the arguments are unusable, or the template refuses them; the message carries its complaint.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError("continue_final_message goes on with the last message and add_generation_prompt starts a new one: choose one")
    conversation = _plain_messages(messages)
    names = {**_plain(dict(variables or {}), "variables"), "messages": conversation, "add_generation_prompt": add_generation_prompt}
    names["tools"] = _plain_schemas(tools, "tools")
    names["documents"] = _plain_schemas(documents, "documents")
    if continue_final_message:
        open_text = _mark_end(conversation[-1])
    compiled = _compile(template)
    try:
        text = compiled.render(names)
    except _TEMPLATE_FAILURES as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    return _cut_at_mark(text, open_text) if continue_final_message else text


def _mark_end(message: dict[str, Any]) -> str:
    """Append the mark to the text of `message`, in place; returns the text without it."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _MARK
            return text
    raise RequestError("continue_final_message needs a last message whose 'content' holds text")


def _cut_at_mark(text: str, open_text: str) -> str:
    head, mark, tail = text.rpartition(_MARK.rstrip())
    if not mark or open_text.strip() not in head:
        raise RequestError("the chat template alters the last message, so continue_final_message cannot go on with it")
    # A template that trimmed the mark's space would have trimmed the text's own end too.
    return head if tail.startswith(" ") else head.rstrip()


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is a {type(messages).__name__}; it must be a list of {{'role': ..., 'content': ...}}")
    if not messages:
        raise RequestError("messages is empty; a conversation needs at least one message")
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] is {message!r}; it must be a mapping with a 'role'")
        # APIs say "content": None or "tool_calls": None where templates test for absence.
        plain.append({key: value for key, value in _plain(message, f"messages[{index}]").items() if value is not None})
    return plain


def _plain_schemas(items: Sequence[Mapping[str, Any]] | None, name: str) -> list[dict[str, Any]] | None:
    if items is None:
        return None
    if isinstance(items, (str, bytes, Mapping)) or not all(isinstance(item, Mapping) for item in items):
        raise RequestError(f"{name} must be a list of mappings (a tool is the JSON schema of a function)")
    return [_plain(item, f"{name}[{index}]") for index, item in enumerate(items)]


def _plain(value: Any, where: str) -> Any:
    """A copy of `value` made of JSON's own types, so that a template meets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    # Members of subclasses (enums, NumPy scalars) lose what the subclass added.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise RequestError(f"{where} holds a {type(value).__name__}; a chat template takes text, numbers, booleans, lists and mappings")


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``, which marks the assistant's words for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template is not valid jinja2: line {error.lineno}: {error.message}") from error
