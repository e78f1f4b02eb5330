from collections import Counter
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from eexport.calibration.data import Encoded, Prompt, Skipped, builtin_prompts, encode, interleave
from eexport.runtime.text import TextCodec

CHATML = (
    "{% for message in messages %}"
    "{% if message.role == 'bad' %}{{ raise_exception('role bad is unknown') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user assistant one two three"], trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    return tokenizer


@pytest.fixture
def chat(tokenizer):
    return TextCodec(tokenizer, chat_template=CHATML, special={})


@pytest.fixture
def raw(tokenizer):
    return TextCodec(tokenizer, chat_template=None, special={})


def text_of(codec, ids):
    return "".join(codec._tokenizer.decode([i], skip_special_tokens=False) for i in ids)


def prompt(content, kind="text", source="x:1", prefix=""):
    return Prompt(kind, content, None, None, None, None, prefix, source)


# Encoding


def test_a_prompt_goes_through_the_template_where_there_is_one(chat, raw):
    (one,), skipped = encode([prompt("hello", prefix="Sure:")], chat, None, 100)
    assert not skipped and not one.cut
    expected = chat.encode_chat([{"role": "user", "content": "hello"}]) + chat.encode("Sure:")
    assert list(one.ids) == expected
    (one,), _ = encode([prompt("hello", prefix="Sure:")], raw, None, 100)
    assert list(one.ids) == raw.encode("helloSure:")


def test_messages_need_a_template(chat, raw):
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    (one,), _ = encode([prompt(messages)], chat, None, 100)
    assert list(one.ids) == chat.encode_chat(messages)
    encoded, skipped = encode([prompt(messages)], raw, None, 100)
    assert not encoded and "no chat template" in skipped[0].reason


def test_what_cannot_be_encoded_is_skipped(chat, raw):
    prompts = [prompt("half \ud800", source="x:1"), prompt(({"role": "bad", "content": "u"},), source="x:2")]
    encoded, skipped = encode([*prompts, prompt("good", source="x:3")], chat, None, 100)
    assert [one.prompt.source for one in encoded] == ["x:3"]
    assert [row.source for row in skipped] == ["x:1", "x:2"]
    assert "surrogate" in skipped[0].reason and "role bad is unknown" in skipped[1].reason
    assert encode([prompt("")], raw, None, 100)[1][0].reason.startswith("is empty")
    assert encode([prompt("")], raw, 7, 100)[0][0].ids == (7,)


@pytest.mark.parametrize("limit", [20, 21, 50, 333])
def test_a_long_prompt_is_cut_inside_the_template(chat, limit):
    long = "word " * 50_000
    messages = ({"role": "user", "content": "keep me"}, {"role": "assistant", "content": "yes"})
    messages += ({"role": "user", "content": long},)
    limit += 30
    (one,), _ = encode([prompt(messages, prefix="Go:")], chat, None, limit)
    assert one.cut and limit - 4 <= len(one.ids) <= limit
    text = text_of(chat, one.ids)
    assert text.startswith("<|im_start|>user\nkeep me<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\nGo:")
    assert "\n<|im_start|>user\nword w" in text


def test_a_prompt_of_just_the_limit_is_whole(chat):
    ids = chat.encode_chat([{"role": "user", "content": "one two three"}])
    assert encode([prompt("one two three")], chat, None, len(ids))[0][0] == Encoded(
        prompt("one two three"), tuple(ids), False
    )
    assert encode([prompt("one two three")], chat, None, len(ids) - 1)[0][0].cut


def test_a_template_that_does_not_fit_is_skipped(chat):
    prompts = [prompt("hello"), prompt(({"role": "system", "content": "x" * 100},), source="x:2")]
    encoded, skipped = encode(prompts, chat, None, 6)
    assert not encoded and all("does not fit in 6 tokens" in row.reason for row in skipped)
    assert len(skipped) == 2


def test_a_long_raw_prompt_keeps_its_start(tokenizer, raw):
    text = "three " * 9
    (one,), _ = encode([prompt(text)], raw, None, 10)
    assert one.cut and list(one.ids) == raw.encode(text)[:10]
    (one,), _ = encode([prompt(text, prefix="Go")], raw, None, 10)
    assert len(one.ids) == 10 and text_of(raw, one.ids).endswith("Go")
    assert "leaves no room" in encode([prompt(text, prefix="Go" * 9)], raw, None, 10)[1][0].reason


def test_a_raw_prompt_gets_the_tokenizers_own_bos(tokenizer):
    with_bos = Tokenizer.from_str(tokenizer.to_str())
    bos = with_bos.token_to_id("<s>")
    with_bos.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    codec = TextCodec(with_bos, chat_template=None, special={})
    for limit in (100, 5):
        (one,), _ = encode([prompt("one two three four", prefix="!")], codec, bos, limit)
        assert one.ids[0] == bos and one.ids.count(bos) == 1


def test_prompts_that_come_to_the_same_tokens_count_once(raw):
    prompts = [prompt("x" * 50, source="x:1"), prompt("x" * 60, source="x:2"), prompt("x" * 60, "log", "x:3")]
    encoded, skipped = encode(prompts, raw, None, 5)
    assert [one.prompt.source for one in encoded] == ["x:1", "x:3"]
    assert skipped == [Skipped("x:2", "same tokens as x:1")]


def test_the_hash_is_of_kind_and_tokens(raw):
    def hash_of(*args, **options):
        return encode([prompt(*args, **options)], raw, None, 99)[0][0].hash

    assert hash_of("one") == hash_of("one", source="y:9")
    assert len({hash_of("one"), hash_of("two"), hash_of("one", "code")}) == 3
    assert len(hash_of("one")) == 16 and int(hash_of("one"), 16) >= 0


# Order


def encoded_of(**kinds):
    rows = [(kind, n) for kind, count in kinds.items() for n in range(count)]
    return [Encoded(prompt(f"{kind} {n}", kind), (n, len(kind)), False) for kind, n in rows]


def test_any_prefix_covers_the_kinds_evenly():
    order = [one.prompt.kind for one in interleave(encoded_of(text=9, code=9, json=4), 1)]
    assert order[:6] == ["code", "json", "text"] * 2
    for size in range(12):
        counts = Counter(order[:size])
        assert max(counts.values(), default=0) - min(counts[kind] for kind in ("code", "json", "text")) <= 1
    assert Counter(order) == {"text": 9, "code": 9, "json": 4}


def test_the_order_depends_on_prompts_and_seed_alone():
    rows = encoded_of(text=30, code=30)
    assert interleave(rows, 5) == interleave(rows[::-1], 5)
    assert interleave(rows, 5) != interleave(rows, 6)
    kept = interleave([row for row in rows if row.prompt.kind == "text" and row.ids[0] < 20], 5)
    assert kept == [row for row in interleave(rows, 5) if row in kept]
    moved = [replace(row, prompt=replace(row.prompt, source="elsewhere:1")) for row in rows]
    assert [row.ids for row in interleave(moved, 5)] == [row.ids for row in interleave(rows, 5)]
    texts = [row.ids[0] for row in interleave(rows, 5) if row.prompt.kind == "text"]
    assert texts != sorted(texts)
    assert interleave([], 5) == []


def test_builtin_prompts_fit_together(chat):
    encoded, skipped = encode(builtin_prompts().prompts, chat, None, 2000)
    assert len(encoded) == 128 and not skipped and not any(one.cut for one in encoded)
    assert Counter(one.prompt.kind for one in interleave(encoded, 0)[:40]) == dict.fromkeys(
        ("code", "json", "math", "text"), 10
    )
