"""The text side of a Hugging Face folder, gathered into one value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eexport.models.config import read_json_if_present
from eexport.models.errors import CheckpointError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """What a runtime needs for text.

    Attributes:
        tokenizer_json: The contents of a tokenizer.json.
        chat_template: Its Jinja source; None where the checkpoint has none.
        special: Strings that a template may use: `bos_token`, `eos_token` and so on.
    """

    tokenizer_json: str
    chat_template: str | None
    special: dict[str, str]


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json, the chat template from wherever it is kept, and the special tokens of `folder`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = "; make it from tokenizer.model with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise CheckpointError(f"{folder}: has no tokenizer.json{hint}")
    text = path.read_text(encoding="utf-8")
    try:  # a broken file should be reported here, not on the device
        Tokenizer.from_str(text)
    except Exception as error:  # the only type that tokenizers raises
        raise CheckpointError(f"{path}: cannot be loaded ({error}); download it again") from error
    config = read_json_if_present(folder / "tokenizer_config.json")
    tokens = {**read_json_if_present(folder / "special_tokens_map.json"), **config}
    special = {name: token for name in _SPECIAL if (token := _text(tokens.get(name)))}
    return TokenizerFiles(text, _chat_template(folder, config), special)


def _text(token: Any) -> str | None:
    """A token's text, given as a string or as a serialised AddedToken."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    template = config.get("chat_template") or read_json_if_present(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {item.get("name"): item.get("template") for item in template}.get("default")
    return template if isinstance(template, str) else None
