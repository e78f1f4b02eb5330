import json
import random
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from eexport.runtime.errors import BundleError, RequestError
from eexport.runtime.text import TextCodec

TEXTS = [
    "plain words, and more words",
    " leading space , comma after a space",
    "def f(x):\n    if x:\n        return  x\n\n\n",
    "smile 😀, family 👨‍👩‍👧‍👦!",
    "你好，世界。 naïve café",
    "नमस्ते 🏳️‍🌈 ∑ 𝔘",
    "",
    " ",
    "   ",
]
CHATML = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'bad' %}{{ raise_exception('role bad\nis unknown') }}{% endif %}\n"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def byte_level() -> Tokenizer:
    """Byte-level BPE with merges, some of which cut characters, as in GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:4], trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def sentencepiece(strip: bool = True) -> Tokenizer:
    """SentencePiece-like BPE with byte fallback; ``strip`` as Llama 2 and Mistral do, else as Gemma."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in ["▁", "▁▁", "▁▁▁▁", "ab", "▁a", "▁ab", *"abcdefghijklmnopqrstuvwxyz,.:!()", "\ufffd"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("a", "b"), ("▁", "a"), ("▁", "ab")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "▁")
    if strip:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """The other way to write a SentencePiece tokenizer: the Metaspace pair."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def gemma() -> Tokenizer:
    return sentencepiece(strip=False)


KINDS = [byte_level, sentencepiece, gemma, metaspace]


def codec_of(tokenizer: Tokenizer, chat_template: str | None = None, **special: str) -> TextCodec:
    return TextCodec(tokenizer, chat_template=chat_template, special=special)


def streamed(codec: TextCodec, ids: list[int]) -> list[str]:
    stream = codec.stream()
    return [*map(stream.push, ids), stream.flush()]


def bytes_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, whatever merges there are."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printable]
    char = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(other)}
    return [tokenizer.token_to_id(char[byte]) for byte in data]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_stream_is_lossless(kind, text):
    tokenizer = kind()
    codec = codec_of(tokenizer)
    for ids in (codec.encode(text), bytes_of(tokenizer, text.encode())):
        deltas = streamed(codec, ids)
        assert "".join(deltas) == codec.decode(ids) == tokenizer.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)
    # Metaspace adds no space of its own before one that is there, and takes it off all the same.
    if kind is not metaspace or not text.startswith(" "):
        assert codec.decode(codec.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_stream_of_any_tokens_is_their_decoding(kind):
    tokenizer, rng = kind(), random.Random(7)
    codec = codec_of(tokenizer)
    size = tokenizer.get_vocab_size()
    pieces = bytes_of(tokenizer, "é你😀 ".encode() + b"\xff\x80\xf0\x9f")
    for _ in range(400):
        pool = rng.choice([range(size + 3), pieces])
        ids = [rng.choice(pool) for _ in range(rng.randrange(60))]
        text = codec.decode(ids)
        assert "".join(streamed(codec, ids)) == text
        reference = tokenizer.decode(ids)
        if kind is byte_level or "\ufffd" not in reference:
            assert text == reference


@pytest.mark.parametrize("kind", KINDS)
def test_characters_come_whole_and_at_once(kind):
    tokenizer = kind()
    codec = codec_of(tokenizer)
    for char in "é你😀":
        data = char.encode()
        ids = codec.encode("x", add_special=False) + bytes_of(tokenizer, data + data)
        waiting = [""] * (len(data) - 1)
        assert streamed(codec, ids)[-2 * len(data) - 1 :] == [*waiting, char, *waiting, char, ""]


@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_stray_bytes(kind):
    tokenizer = kind()
    codec = codec_of(tokenizer)
    head = codec.encode("a", add_special=False)
    for data in (
        b"\xf0\x9f\x98",
        b"\xff",
        b"\x80\x80",
        b"\xe0\x80",
        b"\xc3\xc3",
        b"\xf4\x90\x80\x80",
        b"\xed\xa0\x80",
    ):
        for ids in (head + bytes_of(tokenizer, data), head + bytes_of(tokenizer, data) + head):
            text = tokenizer.decode(ids)
            assert "".join(streamed(codec, ids)) == codec.decode(ids) == text
            assert "\ufffd" in text
            json.dumps(text).encode()


def test_whole_characters_survive_a_cut_in_byte_fallback():
    tokenizer = sentencepiece()
    codec = codec_of(tokenizer)
    ids = bytes_of(tokenizer, "你好".encode() + "😀".encode()[:2])
    assert codec.decode(ids) == "你好\ufffd\ufffd" == "".join(streamed(codec, ids))


def test_a_newline_by_byte_fallback_does_not_wait():
    tokenizer = sentencepiece()
    codec = codec_of(tokenizer)
    assert streamed(codec, codec.encode("a\n"))[-2:] == ["\n", ""]


def test_special_tokens_leave_no_text_and_take_no_space():
    tokenizer = sentencepiece()
    codec = codec_of(tokenizer)
    space_a = tokenizer.token_to_id("▁a")
    ids = [1, space_a, 2, 1, space_a, 2, 99_999, space_a]
    assert codec.decode(ids) == "a a a" == "".join(streamed(codec, ids))
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(token) for token in ("<|im_start|>", "<think>", "<|im_end|>")]
    assert codec_of(tokenizer).decode(ids) == "<think>" == "".join(streamed(codec_of(tokenizer), ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [b"\x80", b"\xf0", "😀".encode(), b" ", b"a"])
def test_a_token_costs_the_same_wherever_it_comes(kind, data, monkeypatch):
    tokenizer = kind()
    codec = codec_of(tokenizer)
    lengths = []
    decode = TextCodec._decode
    monkeypatch.setattr(TextCodec, "_decode", lambda self, ids: lengths.append(len(ids)) or decode(self, ids))
    ids = bytes_of(tokenizer, data * (600 // len(data)))
    stream = codec.stream()
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert max(lengths, default=0) <= 17
    assert len(lengths) <= 2 * len(ids)
    assert text == codec.decode(ids)


def test_encode():
    codec = codec_of(sentencepiece())
    assert codec.encode("") == [1]
    assert codec.encode("", add_special=False) == []
    assert codec.encode("ab") == [1, *codec.encode("ab", add_special=False)]
    for wrong in (None, 3, ["ab"], "\ud83d"):
        with pytest.raises(RequestError, match="^prompt: ") as caught:
            codec.encode(wrong)
        assert caught.value.field == "prompt"


def test_a_length_limit_in_the_tokenizer_file_does_not_cut():
    tokenizer = sentencepiece()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(codec_of(tokenizer).encode("abcdef" * 2, add_special=False)) == 10


def test_load_from_any_folder(tmp_path):
    folder = tmp_path / "Modèle 模型 #1"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(sentencepiece().to_str(), encoding="utf-8")
    codec = TextCodec.load(folder, chat_template=None, special={})
    assert codec.decode(codec.encode("a 😀")) == "a 😀"


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b'{"model": null}'])
def test_load_refuses_a_bad_file(tmp_path: Path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BundleError, match="tokenizer.json: ") as caught:
        TextCodec.load(tmp_path, chat_template=None, special={})
    assert "\n" not in str(caught.value)


def test_render_chat_as_transformers_does():
    codec = codec_of(byte_level(), CHATML)
    assert codec.render_chat(HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert codec.render_chat(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"
    ids = codec.encode_chat(HELLO)
    assert ids[0] == codec.encode("<|im_start|>")[0]
    assert codec.decode(ids) == "user\nhello\nassistant\n"


def test_one_bos_and_only_from_the_template():
    body = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with_bos = codec_of(sentencepiece(), "{{ bos_token }}" + body, bos_token="<s>")
    assert with_bos.render_chat(HELLO) == "<s>hello"
    assert with_bos.encode_chat(HELLO).count(1) == 1
    assert codec_of(sentencepiece(), body).encode_chat(HELLO).count(1) == 0


def test_template_features():
    template = (
        "{%- for m in messages -%}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{%- endfor -%}"
        "{{ strftime_now('%Y') | length }}{{ eos_token }}{{ tools is none }}"
    )
    message = {"role": "user", "content": "é<&>", "name": None}
    text = codec_of(byte_level(), template, eos_token="</s>").render_chat([message, message])
    assert text == '{"role": "user", "content": "é<&>"}4</s>True'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no\nsystem role') }}",
        "{% if %}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_failing_template_is_one_line(template):
    with pytest.raises(RequestError, match="^messages: the chat template failed, .") as caught:
        codec_of(byte_level(), template).render_chat(HELLO)
    assert caught.value.field == "messages"
    assert "\n" not in str(caught.value)


def test_no_template_is_not_guessed():
    with pytest.raises(RequestError, match="no chat template") as caught:
        codec_of(byte_level()).encode_chat(HELLO)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages: "),
        (None, "messages: "),
        ("hello", "messages: "),
        ({"role": "user", "content": "hello"}, "messages: "),
        ([None], r"messages\[0\]: "),
        ([*HELLO, "hello"], r"messages\[1\]: "),
        ([{"content": "hello"}], r"messages\[0\].role: "),
        ([{"role": "user"}], r"messages\[0\].content: "),
        ([{"role": "user", "content": None}], r"messages\[0\].content: "),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: "),
        ([{"role": "user", "content": "\ud83d"}], "messages: half a surrogate"),
        ([{"role": "bad", "content": "hello"}], "messages: the chat template failed, role bad is unknown"),
    ],
)
def test_wrong_messages_are_named(messages, where):
    with pytest.raises(RequestError, match="^" + where) as caught:
        codec_of(byte_level(), CHATML).encode_chat(messages)
    assert caught.value.field == "messages"
    assert "\n" not in str(caught.value)
