"""Chat templates: messages to the text of a prompt.

Knows Jinja as model files use it; knows no tokens.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, sandbox

type Message = Mapping[str, Any]

# What a template can raise, being no Jinja or not made for the messages: filters assert, blocks may be nested
# deeper than Python's, and a macro may call itself for ever.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A model's chat template.

    Template code comes from a stranger: it runs in Jinja's immutable sandbox, with the settings and helpers
    that published templates expect (https://huggingface.co/docs/transformers/chat_templating_writing).

    Args:
        source: the template's text; a ValueError if it is no template.
        named_tokens: the texts of `bos_token`, `eos_token` and others that it may name.
    """

    def __init__(self, source: str, **named_tokens: str):
        self.source = source
        self._named_tokens = named_tokens
        try:
            self._template = _make_environment().from_string(source)
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template must be Jinja, but does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Write `messages` as a prompt.

        Args:
            messages: what was said; each has a `role` and what the template wants with it.
            add_generation_prompt: end where the model's reply begins.
            tools: JSON schemas of the functions that the model may call.
            **variables: whatever else the template reads; they win over named tokens.

        Returns:
            The prompt. Whatever the template raises, its own refusals included, is one ValueError.
        """
        names = {
            **self._named_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
        }
        try:
            return self._template.render(names | variables)
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template must accept these messages, but fails: {error}") from error


class _Generation(ext.Extension):
    """Accepts `{% generation %}` around a reply, a tag for training masks, and renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's class declares it so)

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _make_environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which models have not seen in JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _format_now(layout: str) -> str:
    return datetime.now().strftime(layout)
