"""The text side: Hugging Face folders and GGUF metadata."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import BOS, IM_END, IM_START, byte_id, edit_config, make_checkpoint, make_gguf
from tokenizers import Tokenizer

from eexport.models.checkpoint import open_checkpoint
from eexport.models.errors import CheckpointError
from eexport.models.gguf_file import GgufFile, read_gguf
from eexport.models.gguf_tokenizer import tokenizer_from_gguf
from eexport.models.tokenizer import read_tokenizer

TEXTS = [
    "hello world, the theatre",
    "def f(x):\n    return x + 1\n\n\n\ty = 2  # ok\r\n",
    "😀 👨‍👩‍👧‍👦 🇩🇪 你好，世界 こんにちは",
    "1234567890 3.14 x2y3",
    "  leading, trailing  ",
    "it's DON'T we'll <|im_start|>user\nhi<|im_end|>",
    "café Ångström ½ ٣",
]


def test_template_places(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    assert (read_tokenizer(tmp_path).chat_template or "").startswith("{%- for message")
    (tmp_path / "chat_template.jinja").unlink()
    assert read_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert read_tokenizer(tmp_path).chat_template == "from json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit_config(tmp_path, "tokenizer_config.json", chat_template=named)
    assert read_tokenizer(tmp_path).chat_template == "plain"
    edit_config(tmp_path, "tokenizer_config.json", chat_template="text")
    assert read_tokenizer(tmp_path).chat_template == "text"
    (tmp_path / "chat_template.jinja").write_text("é", encoding="utf-8")
    assert read_tokenizer(tmp_path).chat_template == "é"


def test_special_tokens(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "<old>"}))
    edit_config(tmp_path, "tokenizer_config.json", bos_token={"content": "<s>", "lstrip": False}, unk_token=None)
    special = read_tokenizer(tmp_path).special
    assert special == {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}


def test_tokenizer_is_required(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be loaded"):
        open_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json$"):
        open_checkpoint(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match="save_pretrained"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("bos", [False, True])
def test_gguf_tokenizer_is_the_folder_s(tmp_path: Path, bos: bool) -> None:
    folder = make_checkpoint(tmp_path / "hf", bos=bos)
    converted = open_checkpoint(make_gguf(tmp_path / "m.gguf", folder)).tokenizer
    original = open_checkpoint(folder).tokenizer
    assert converted.chat_template == original.chat_template
    assert converted.special == original.special
    ours, theirs = Tokenizer.from_str(converted.tokenizer_json), Tokenizer.from_str(original.tokenizer_json)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text).ids
        assert (ids[0] == BOS) == bos
        assert ours.decode(ids[bos:], skip_special_tokens=False) == text
    assert ours.encode("<|im_start|><|im_end|>", add_special_tokens=False).ids == [IM_START, IM_END]
    assert ours.decode([IM_START, byte_id(ord("a")), 319, IM_END]) == "a"  # 319 is padding


def gguf_metadata(**changes: Any) -> GgufFile:
    """A SentencePiece vocabulary: bytes, a few scored pieces, a user-defined and a control token."""
    pieces = ["▁", "a", "b", "▁a", "ab", "abab"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        "<tool>",
        "<|user|>",
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -2.0, -1.0, -1.5] + [0.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4, 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return GgufFile(Path("m.gguf"), metadata | changed, {})


def pieces_of(text: str, **changes: Any) -> list[str]:
    tokenizer = Tokenizer.from_str(tokenizer_from_gguf(gguf_metadata(**changes)).tokenizer_json)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("<|user|>", "")
    return tokenizer.encode(text).tokens


def test_sentencepiece() -> None:
    assert pieces_of("ab abab a") == ["<s>", "▁", "ab", "▁", "abab", "▁a"]  # better scores merge first
    assert pieces_of("aab") == ["<s>", "▁a", "ab"]
    assert pieces_of("ab", add_space_prefix=False, add_bos_token=False) == ["ab"]
    assert pieces_of("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces_of("<tool>b", add_space_prefix=False) == ["<s>", "<tool>", "b"]
    assert pieces_of("<|user|>b", add_space_prefix=False) == ["<s>", "<|user|>", "b"]


def test_only_control_tokens_are_special() -> None:
    state = json.loads(tokenizer_from_gguf(gguf_metadata()).tokenizer_json)
    added = {token["content"]: token["special"] for token in state["added_tokens"]}
    assert added == {"<s>": True, "</s>": True, "<tool>": False, "<|user|>": True}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model 't5'"),
        ({"model": "gpt2", "pre": "deepseek-llm"}, "tokenizer.ggml.pre 'deepseek-llm'"),
        ({"model": "gpt2", "pre": "qwen2"}, "tokenizer.ggml.merges"),
        ({"tokens": []}, "tokenizer.ggml.tokens"),
        ({"scores": None}, "tokenizer.ggml.scores"),
    ],
)
def test_refusals(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        tokenizer_from_gguf(gguf_metadata(**changes))


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a12345 b", ["a", "1", "2", "3", "4", "5", "Ġ", "b"]),
        ("smollm", "12", ["1", "2"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # the original normalises to NFC
        ("llama-bpe", "12", ["1", "2"]),
        ("default", "12", ["1", "2"]),
    ],
)
def test_splitting_rules(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    file = read_gguf(make_gguf(tmp_path / "m.gguf", make_checkpoint(tmp_path / "hf")))
    file.metadata["tokenizer.ggml.pre"] = pre
    file.metadata["tokenizer.ggml.merges"] = ["Ġ t"]
    tokenizer = Tokenizer.from_str(tokenizer_from_gguf(file).tokenizer_json)
    assert tokenizer.encode(text, add_special_tokens=False).tokens == expected
    for line in TEXTS:
        assert tokenizer.decode(tokenizer.encode(line).ids, skip_special_tokens=False) == line
