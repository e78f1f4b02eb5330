"""Text to tokens and back: encoding, chat templates, and decoding one token at a time."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from eexport.runtime.errors import BundleError, RequestError

_REPLACEMENT = "\ufffd"
# A stream decodes this many of its last tokens: enough context for any character (4 bytes) and for a
# decoder that treats the first token apart, and so few that a token costs the same wherever it comes.
_WINDOW, _KEEP = 16, 8


class TextCodec:
    """One bundle's tokenizer and chat template; holds no request's state, so requests may share it."""

    def __init__(self, tokenizer: Tokenizer, *, chat_template: str | None, special: Mapping[str, str]) -> None:
        """Wrap ``tokenizer``; ``special`` names tokens for the template: ``{"bos_token": "<s>"}``."""
        tokenizer.no_truncation()  # a limit left in tokenizer.json would cut prompts without a word
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template_text = chat_template
        self._special = dict(special)
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_pieces: dict[int, int] = {}
        if "ByteFallback(" in repr(tokenizer.decoder):
            pieces = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
            self._byte_pieces = {token_id: byte for token_id, byte in pieces if token_id is not None}

    @classmethod
    def load(cls, folder: Path, *, chat_template: str | None, special: Mapping[str, str]) -> "TextCodec":
        """Read ``folder/tokenizer.json``; BundleError where it is missing or unreadable."""
        path = folder / "tokenizer.json"
        try:
            # Read here and not by the library, which cannot open every path that Python can.
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BundleError(f"{path}: cannot be read ({error.strerror}); build the bundle again") from error
        except Exception as error:  # the library raises plain Exception
            raise BundleError(f"{path}: not a tokenizer ({_one_line(error)}); build the bundle again") from error
        return cls(tokenizer, chat_template=chat_template, special=special)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._template_text is not None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of ``text``, with the tokenizer's own BOS or the like if ``add_special``."""
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a string, got {reprlib.repr(text)}", "prompt")
        return self._encode(text, add_special, "prompt")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``: special tokens left out, spaces as they are, no clean-up.

        Invalid bytes become U+FFFD. Among byte-fallback pieces they do so one by one, and whole characters
        beside them stay, as in SentencePiece; the tokenizers library would lose the whole run of bytes.
        """
        text = self._decode(token_ids)
        if self._byte_pieces and _REPLACEMENT in text:
            stream = self.stream()
            return "".join(map(stream.push, token_ids)) + stream.flush()
        return text

    def stream(self) -> "TokenStream":
        """Decode one reply token by token."""
        return TokenStream(self)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Text of a conversation under the model's chat template; RequestError where that cannot be."""
        conversation = _checked(messages)
        if self._template_text is None:
            raise RequestError("messages: this model has no chat template; send a plain prompt", "messages")
        variables: dict[str, Any] = {**self._special, "tools": None, "documents": None}
        variables |= {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is a program from elsewhere, and can fail in any way
            message = f"messages: the chat template failed, {_one_line(error)}"
            raise RequestError(message, "messages") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. A template writes its own BOS, so the tokenizer adds none."""
        return self._encode(self.render_chat(messages, add_generation_prompt), False, "messages")

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._template_text or "")

    def _encode(self, text: str, add_special: bool, field: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"{field}: half a surrogate pair, not a character, at {error.start} in the text"
            raise RequestError(message, field) from error
        return self._tokenizer.encode(text, add_special_tokens=add_special).ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _leaves_no_text(self, token_id: int) -> bool:
        # The second case is an id of the padding that some models have at the end of the vocabulary.
        return token_id in self._hidden or self._tokenizer.id_to_token(token_id) is None


class TokenStream:
    """Decode a reply as it comes: joined deltas plus ``flush()`` are ``TextCodec.decode`` of all its tokens.

    Each token costs the same wherever it comes: only a window of the last tokens is decoded again.
    """

    def __init__(self, codec: TextCodec) -> None:
        """Start a reply in the tokens of ``codec``."""
        self._codec = codec
        self._window: list[int] = []
        self._sent = 0  # how many characters of the window's text were given out
        self._held = ""  # the U+FFFD at the end of the window's text: perhaps a character half way
        self._bytes = bytearray()  # byte-fallback pieces that are not a whole character yet, 3 at most
        self._after_bytes = False  # whether byte pieces came last, which _sent does not count

    def push(self, token_id: int) -> str:
        """Text that ``token_id`` completes: "" while a character is half way, or for a special token."""
        codec = self._codec
        if codec._leaves_no_text(token_id):
            return ""
        if (byte := codec._byte_pieces.get(token_id)) is not None:
            return self._push_byte(token_id, byte)

        delta = ""
        if self._after_bytes:
            delta = self.flush()
            self._sent = len(codec._decode(self._window))
            self._after_bytes = False
        self._window.append(token_id)
        text = codec._decode(self._window)
        # With byte-level pieces the end of an unfinished character reads as one U+FFFD, which more bytes may
        # mend. With byte fallback an ordinary piece is always whole.
        self._held = _REPLACEMENT if text.endswith(_REPLACEMENT) and not codec._byte_pieces else ""
        settled = len(text) - len(self._held)
        delta += text[self._sent : settled]
        self._sent = settled
        if len(self._window) > _WINDOW:
            self._shorten_window()
        return delta

    def flush(self) -> str:
        """What is still held when no more tokens come: U+FFFD for a character cut short."""
        rest = self._held + _REPLACEMENT * len(self._bytes)
        self._held = ""
        self._bytes.clear()
        return rest

    def _shorten_window(self) -> None:
        tail = self._window[-_KEEP:]
        # A decoder may strip the space that starts its text. With text in the window, that is behind us.
        if text := self._codec._decode(tail):
            self._window = tail
            self._sent = len(text) - len(self._held)

    def _push_byte(self, token_id: int, byte: int) -> str:
        is_first = not self._window
        self._window.append(token_id)
        del self._window[:-_KEEP]
        self._after_bytes = True
        self._bytes.append(byte)
        text = self._whole_characters()
        # The decoder may strip a space that starts the text, and this byte may be one.
        return self._codec._decode(self._window) if text and is_first else text

    def _whole_characters(self) -> str:
        text = ""
        while self._bytes:
            try:
                text += self._bytes.decode("utf-8")
                self._bytes.clear()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text += _REPLACEMENT
                del self._bytes[0]
        return text


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which templates written for transformers do not expect.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _checked(messages: object) -> list[dict[str, Any]]:
    """The messages as plain dicts without null fields; RequestError names the first that is wrong."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages: expected a non-empty list, got {reprlib.repr(messages)}", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            got = reprlib.repr(message)
            raise RequestError(f"messages[{index}]: expected an object, got {got}", "messages")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got = reprlib.repr(message.get(key))
                raise RequestError(f"messages[{index}].{key}: expected a string, got {got}", "messages")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
