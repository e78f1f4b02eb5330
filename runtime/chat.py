"""A conversation of many turns on one engine, and the loop that leads it."""

from collections.abc import Callable
from typing import Any

from eexport.runtime.engine import Engine, FinishReason
from eexport.runtime.errors import RequestError

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops a reply"


class Conversation:
    """The messages so far. Each turn gives all of them to the engine, which runs what its cache lacks."""

    def __init__(self, engine: Engine, system: str | None = None, **sampling: Any) -> None:
        """Start one; ``sampling`` is for ``Engine.generate``. RequestError when no template is there."""
        if engine.manifest.text.chat_template is None:
            raise RequestError("this bundle has no chat template: use `eexport run` with plain text")
        self._engine, self._sampling = engine, sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)

    def reply(self, text: str, say: Callable[[str], None]) -> FinishReason | None:
        """Answer ``text``, giving each piece to ``say``; None when Ctrl-C stopped it; what was said counts.

        Raises:
            RequestError: It cannot be answered, e.g. does not fit; the conversation is as before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        said = ""
        reason: FinishReason | None = None
        try:
            for token in self._engine.generate(messages, **self._sampling):
                said += token.text
                say(token.text)
                reason = token.finish_reason
        except KeyboardInterrupt:
            pass
        if said or reason:
            self.messages = [*messages, {"role": "assistant", "content": said}]
        return reason


def converse(
    conversation: Conversation,
    ask: Callable[[], str],
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Lead a conversation until ``ask`` raises EOFError or gives /exit; ``note`` takes what is no reply."""
    while True:
        try:
            text = ask().strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/help":
            note(HELP)
        elif text == "/reset":
            conversation.reset()
            note("the conversation is forgotten")
        elif text:
            _turn(conversation, text, say, note)


def _turn(conversation: Conversation, text: str, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    try:
        reason = conversation.reply(text, say)
    except RequestError as error:
        note(f"{error} (/reset starts over)")
        return
    say("\n")
    if reason == "length":
        note("(stopped: the limit of tokens is reached)")
