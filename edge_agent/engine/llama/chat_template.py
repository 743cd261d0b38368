"""Renders a chat with a model's own template, in a sandbox.

The template is a program that came with the weights: it runs without access to Python's
insides, and a fault in it is a reason to refuse chats, never to refuse the model.
"""

import datetime
import json
from collections.abc import Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

from edge_agent.engine.base import Message
from edge_agent.engine.llama.special_texts import Hiding, Piece, SpecialTexts

_TRIAL: tuple[Message, ...] = (
    Message("user", "Hello"),
    Message("assistant", "Hello!"),
    Message("user", "Bye"),
)


class TemplateError(Exception):
    """A template cannot be used, or refuses this chat; the text says why in one sentence."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja, in the dialect of Hugging Face's chat templates.
        bos_token: the text of the token that begins a sequence; "" when there is none.
        eos_token: the text of the token that ends one.

    Raises:
        TemplateError: it does not compile, or cannot render a plain chat.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"The chat template does not compile: {error}.") from error
        rendered = self.render(_TRIAL)
        if "Hello" not in rendered or "Bye" not in rendered:
            raise TemplateError("The chat template leaves out what the user said.")

    def pieces(self, messages: Sequence[Message], special: SpecialTexts) -> Sequence[Piece]:
        """The prompt of a chat as `render` gives it, with the messages' control tokens disarmed.

        Args:
            special: what must stay plain text where a message has it.

        Raises:
            TemplateError: the template refuses these messages, or is faulty.
        """
        try:
            hiding = Hiding(special, (turn.content for turn in messages))
            hidden = [Message(turn.role, hiding.hide(turn.content)) for turn in messages]
            return hiding.pieces(self.render(hidden))
        except ValueError as error:
            raise TemplateError(f"The chat template refuses this chat: {error}.") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a chat, up to where the assistant's answer begins.

        Raises:
            TemplateError: the template refuses these messages, or is faulty.
        """
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=True, tools=None, **self._tokens
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"The chat template refuses this chat: {error}.") from error
        except Exception as error:
            # A template can raise anything that Python's operators raise.
            raise TemplateError(
                f"The chat template is faulty: {type(error).__name__}: {error}."
            ) from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not have.
    return json.dumps(value, ensure_ascii=False, indent=indent)
