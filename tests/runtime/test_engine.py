"""The engine: what comes out of a request, what is refused, and that none leaves a trace in the next."""

import gc
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from tiny import BOS, IM_END, byte_id, edit_config, make_checkpoint, make_scripted

from eexport.runtime.backend_fake import FakeBackend
from eexport.runtime.engine import Engine, Token
from eexport.runtime.errors import ContextError, DeviceError, EexportError, RequestError

Make = Callable[..., Path]
Load = Callable[..., Engine]

CONTEXT = 200
TEXT = "😀世界é, ok!"  # no two bytes alike, so each can name the one that follows
A, B, C, D, LAST, OTHER_END = 281, 282, 283, 284, 290, 291  # tokens that are no single byte


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Make, tiny_bundle: Make) -> Path:
    """A random model, so that every token depends on all before it."""
    return tiny_bundle(tiny_checkpoint(soft=True, layers=4, context=CONTEXT), precision="int8", blocks="2")


@pytest.fixture
def engine(bundle: Path, tiny_engine: Load) -> Engine:
    return tiny_engine(bundle)


@pytest.fixture(scope="module")
def scripted_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Make) -> Path:
    """After "<" comes `TEXT` and an end token, after A come B, C, D, A …, after LAST another end token."""
    folder = tmp_path_factory.mktemp("scripted") / "checkpoint"
    ids = [byte_id(byte) for byte in ("<" + TEXT).encode()]
    follows = dict(zip(ids, [*ids[1:], IM_END], strict=True))
    follows |= {A: B, B: C, C: D, D: A, LAST: OTHER_END}
    ends = {"eos_token_id": [IM_END, OTHER_END]}  # in generation_config.json alone
    make_scripted(folder, follows, layers=2, context=CONTEXT, generation=ends)
    return tiny_bundle(folder, blocks="2")


@pytest.fixture
def scripted(scripted_bundle: Path, tiny_engine: Load) -> Engine:
    return tiny_engine(scripted_bundle)


def ids_of(tokens: Iterator[Token] | list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def text_of(tokens: Iterator[Token] | list[Token]) -> str:
    return "".join(token.text for token in tokens)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 300, length)]


class TestTokens:
    def test_greedy_takes_the_likeliest_of_score(self, engine: Engine) -> None:
        prompt = prompt_of(20)
        tokens = ids_of(engine.generate(prompt, max_tokens=30, ignore_eos=True))
        logits = engine.score(prompt + tokens)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens

    def test_fields(self, engine: Engine) -> None:
        tokens = list(engine.generate(prompt_of(5), max_tokens=3, ignore_eos=True))
        assert [token.finish_reason for token in tokens] == [None, None, "length"]
        assert {(token.exit_layer, token.proposer, token.logprob) for token in tokens} == {(4, None, None)}
        assert text_of(tokens) == engine.codec.decode(ids_of(tokens))

    @pytest.mark.parametrize("count", [1, 2, 3, 7])
    def test_max_tokens_is_exact(self, scripted: Engine, count: int) -> None:
        tokens = list(scripted.generate([A], max_tokens=count))
        assert ids_of(tokens) == [B, C, D, A, B, C, D][:count]
        assert [token.finish_reason for token in tokens] == [None] * (count - 1) + ["length"]
        assert scripted.stats().generated_tokens == count

    @pytest.mark.parametrize(("prompt", "end"), [(5, IM_END), (LAST, OTHER_END)])
    def test_any_end_token_stops_and_is_not_shown(self, scripted: Engine, prompt: int, end: int) -> None:
        (token,) = scripted.generate([prompt], max_tokens=1)
        assert (token.token_id, token.text, token.finish_reason) == (end, "", "stop")

    def test_ignore_eos_and_stop_token_ids(self, scripted: Engine) -> None:
        tokens = list(scripted.generate([LAST], max_tokens=3, ignore_eos=True))
        assert ids_of(tokens) == [OTHER_END, IM_END, IM_END] and tokens[-1].finish_reason == "length"
        tokens = list(scripted.generate([A], stop_token_ids=[D], ignore_eos=True))
        assert ids_of(tokens) == [B, C, D] and tokens[-1].finish_reason == "stop"
        assert tokens[-1].text == ""

    def test_logprobs_are_log_softmax(self, engine: Engine) -> None:
        prompt = prompt_of(12)
        tokens = list(engine.generate(prompt, max_tokens=6, ignore_eos=True, logprobs=4, temperature=1, seed=1))
        logits = engine.score(prompt + ids_of(tokens)).astype(np.float64)[len(prompt) - 1 :]
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, token in zip(expected, tokens, strict=False):
            assert token.logprob == pytest.approx(row[token.token_id], abs=1e-5)
            best = np.argsort(-row)[:4].tolist()
            assert [token_id for token_id, _ in token.top_logprobs] == best
            assert [logprob for _, logprob in token.top_logprobs] == pytest.approx(row[best], abs=1e-5)

    def test_seeds(self, engine: Engine) -> None:
        def draw(seed: int | None) -> list[int]:
            return ids_of(engine.generate(prompt_of(4), max_tokens=20, temperature=1.5, seed=seed, ignore_eos=True))

        assert draw(3) == draw(3)
        assert draw(3) != draw(4)
        assert draw(None) != draw(None)

    def test_tiny_temperature_is_greedy(self, engine: Engine) -> None:
        greedy = ids_of(engine.generate(prompt_of(4), max_tokens=10))
        assert ids_of(engine.generate(prompt_of(4), max_tokens=10, temperature=1e-4, seed=5)) == greedy


class TestText:
    def test_characters_come_whole(self, scripted: Engine) -> None:
        tokens = list(scripted.generate("<"))
        assert text_of(tokens) == TEXT
        assert all("\ufffd" not in token.text for token in tokens)
        assert [token.text for token in tokens[:4]] == ["", "", "", "😀"]
        assert tokens[-1].finish_reason == "stop" and tokens[-1].text == ""

    @pytest.mark.parametrize("count", range(1, 13))
    def test_cap_within_a_character(self, scripted: Engine, count: int) -> None:
        tokens = list(scripted.generate("<", max_tokens=count))
        assert text_of(tokens) == scripted.codec.decode(ids_of(tokens))

    @pytest.mark.parametrize(
        ("stop", "expected"),
        [
            (["界é"], "😀世"),  # over five tokens
            (["界", "世界"], "😀"),
            (["ok!?", "é,x"], TEXT),  # held back, and given out in the end
            ([", ok"], "😀世界é"),
            (["!"], TEXT[:-1]),
            (TEXT[-1:], TEXT[:-1]),
            (["\ufffd"], TEXT),
        ],
    )
    def test_stop_strings(self, scripted: Engine, stop: list[str] | str, expected: str) -> None:
        tokens = list(scripted.generate("<", stop=stop))
        assert text_of(tokens) == expected
        assert [token.finish_reason for token in tokens[:-1]] == [None] * (len(tokens) - 1)
        assert tokens[-1].finish_reason == "stop"

    def test_stop_string_that_the_cap_leaves_unfinished(self, scripted: Engine) -> None:
        tokens = list(scripted.generate("<", stop=["世界 and more"], max_tokens=10))
        assert text_of(tokens) == "😀世界" and tokens[-1].finish_reason == "length"

    def test_messages_go_through_the_template(self, engine: Engine) -> None:
        messages = [{"role": "user", "content": "hello"}]
        by_chat = list(engine.generate(messages, max_tokens=5, logprobs=3))
        rendered = engine.codec.render_chat(messages)
        assert rendered.startswith("<|im_start|>user\nhello<|im_end|>")
        assert list(engine.generate(rendered, max_tokens=5, logprobs=3)) == by_chat


class TestReuse:
    def test_the_next_turn_equals_a_fresh_prefill(self, bundle: Path, tiny_engine: Load) -> None:
        engine = tiny_engine(bundle)
        request: dict[str, Any] = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True}
        turn = prompt_of(20)
        for step in range(4):
            tokens = list(engine.generate(turn, **request))
            assert engine.stats().reused_tokens == (0 if step == 0 else len(turn) - 6)  # 5 new, 1 not yet run
            assert tokens == list(tiny_engine(bundle).generate(turn, **request)), f"turn {step}"
            turn = turn + ids_of(tokens) + prompt_of(5, seed=step)

    @pytest.mark.parametrize("kept", [0, 1, 10, 19, 20])
    def test_a_shared_prefix_equals_a_fresh_prefill(self, bundle: Path, tiny_engine: Load, kept: int) -> None:
        engine = tiny_engine(bundle)
        request: dict[str, Any] = {"max_tokens": 8, "logprobs": 3, "ignore_eos": True}
        first = prompt_of(20)
        list(engine.generate(first, **request))
        second = first[:kept] + [301] + prompt_of(30, seed=1)
        tokens = list(engine.generate(second, **request))
        assert engine.stats().reused_tokens == kept
        assert tokens == list(tiny_engine(bundle).generate(second, **request))

    def test_the_same_prompt_and_its_beginning(self, engine: Engine) -> None:
        request: dict[str, Any] = {"max_tokens": 4, "logprobs": 3, "ignore_eos": True}
        prompt = prompt_of(20)
        expected = list(engine.generate(prompt, **request))
        assert list(engine.generate(prompt, **request)) == expected
        assert engine.stats().reused_tokens == 19  # the last token is run again, for its logits
        beginning = list(engine.generate(prompt[:7], **request))
        assert engine.stats().reused_tokens == 6
        assert beginning == list(engine.generate(prompt[:7], reuse_cache=False, **request))
        assert engine.stats().reused_tokens == 0

    def test_an_abandoned_generator_leaves_the_engine_usable(self, engine: Engine) -> None:
        prompt = prompt_of(20)
        expected = list(engine.generate(prompt, max_tokens=10, logprobs=2))
        abandoned = engine.generate(prompt + [5], max_tokens=10)
        next(abandoned)
        next(abandoned)
        abandoned.close()  # type: ignore[attr-defined]
        engine.generate(prompt_of(30, seed=9))  # never started
        assert list(engine.generate(prompt, max_tokens=10, logprobs=2)) == expected

    def test_a_later_request_ends_an_earlier_one(self, engine: Engine) -> None:
        first = engine.generate(prompt_of(20), max_tokens=10, ignore_eos=True)
        next(first)
        with pytest.raises(RequestError):
            engine.generate(prompt_of(20), temperature=-1)
        next(first)  # a request that was refused is none
        second = engine.generate(prompt_of(8), max_tokens=10, ignore_eos=True)
        next(second)
        with pytest.raises(EexportError, match="later one"):
            next(first)
        assert len(list(second)) == 9
        with pytest.raises(StopIteration):
            next(first)

    def test_scoring_ends_a_request(self, engine: Engine) -> None:
        request = engine.generate(prompt_of(20), max_tokens=10, ignore_eos=True)
        next(request)
        engine.score(prompt_of(5))
        with pytest.raises(EexportError, match="later one"):
            next(request)

    def test_many_short_requests(self, bundle: Path, tiny_engine: Load) -> None:
        assert_requests_leave_no_trace(tiny_engine(bundle), 60)

    @pytest.mark.slow
    def test_hundreds_of_requests_take_no_memory(self, bundle: Path, tiny_engine: Load) -> None:
        engine = tiny_engine(bundle)
        assert_requests_leave_no_trace(engine, 100)
        gc.collect()
        before = psutil.Process().memory_info().rss
        assert_requests_leave_no_trace(engine, 400)
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 8 << 20


def assert_requests_leave_no_trace(engine: Engine, count: int) -> None:
    """Random requests between two equal ones, and a replay of each tenth."""
    chance = random.Random(count)
    seen: list[tuple[list[int], dict[str, Any], list[Token]]] = []
    for number in range(count):
        prompt = prompt_of(chance.randint(1, 150), seed=chance.randint(0, 20))
        request: dict[str, Any] = {"max_tokens": chance.randint(1, 40), "seed": number}
        request["temperature"] = chance.choice([0, 0, 1])
        tokens = list(engine.generate(prompt, **request, logprobs=1))
        if number % 10 == 0:
            seen.append((prompt, request, tokens))
    for prompt, request, tokens in seen:
        assert list(engine.generate(prompt, **request, logprobs=1)) == tokens


class TestContext:
    def test_a_prompt_up_to_the_last_place(self, scripted: Engine) -> None:
        assert scripted.context == CONTEXT
        tokens = list(scripted.generate([A] * (CONTEXT - 1)))
        assert ids_of(tokens) == [B] and tokens[-1].finish_reason == "length"
        for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
            with pytest.raises(ContextError, match=f"{length} tokens") as caught:
                scripted.generate([A] * length)
            assert caught.value.field == "prompt"
        assert ids_of(scripted.generate([A], max_tokens=2)) == [B, C]

    @pytest.mark.parametrize("max_tokens", [None, 1000])
    def test_output_to_the_end_of_the_context(self, scripted: Engine, max_tokens: int | None) -> None:
        tokens = list(scripted.generate([A] * 20, max_tokens=max_tokens))
        assert len(tokens) == CONTEXT - 20 and tokens[-1].finish_reason == "length"
        assert ids_of(tokens) == ([B, C, D, A] * CONTEXT)[: len(tokens)]

    def test_a_smaller_context(self, scripted_bundle: Path, tiny_engine: Load) -> None:
        engine = tiny_engine(scripted_bundle, context=1)
        with pytest.raises(ContextError):
            engine.generate([A])
        engine = tiny_engine(scripted_bundle, context=2)
        assert ids_of(engine.generate([A])) == [B]

    @pytest.mark.parametrize("context", [0, -1, CONTEXT + 1])
    def test_out_of_range(self, bundle: Path, context: int) -> None:
        with pytest.raises(ContextError, match=f"--context {context}"):
            Engine.load(bundle, context=context)

    def test_the_default_fits_in_memory(
        self, tmp_path: Path, tiny_bundle: Make, tiny_engine: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = make_checkpoint(tmp_path / "long", layers=2, context=131072)
        long_bundle = tiny_bundle(folder)
        monkeypatch.setattr("eexport.runtime.engine.available_memory", lambda: 2 << 20)
        engine = tiny_engine(long_bundle)
        per_token = engine.manifest.kv_bytes_per_token()
        assert engine.context == (1 << 20) // per_token  # half of it
        assert len(list(engine.generate([5], max_tokens=3, ignore_eos=True))) == 3
        with pytest.raises(DeviceError, match="--context 131072") as caught:
            tiny_engine(long_bundle, context=131072)
        assert f"{engine.context} tokens would fit" in str(caught.value)
        monkeypatch.setattr("eexport.runtime.engine.available_memory", lambda: None)
        assert tiny_engine(long_bundle).context == 131072


class TestRequests:
    @pytest.mark.parametrize("prompt", [None, 5, b"abc", {"role": "user"}, [1.5], ["a"], [None], {1, 2}])
    def test_prompt_of_a_wrong_type(self, engine: Engine, prompt: Any) -> None:
        with pytest.raises(RequestError) as caught:
            engine.generate(prompt)
        assert caught.value.field in ("prompt", "messages") and "\n" not in str(caught.value)

    def test_empty_prompt(self, engine: Engine, tmp_path: Path, tiny_bundle: Make, tiny_engine: Load) -> None:
        assert engine.manifest.model.bos_token_id == BOS
        assert ids_of(engine.generate("", max_tokens=4)) == ids_of(engine.generate([BOS], max_tokens=4))
        with pytest.raises(RequestError, match="empty"):
            engine.generate([])
        bare = edit_config(make_checkpoint(tmp_path / "bare", layers=1), bos_token_id=None)
        with pytest.raises(RequestError, match="empty") as caught:
            tiny_engine(tiny_bundle(bare)).generate("")
        assert caught.value.field == "prompt"

    @pytest.mark.parametrize("ids", [[-1], [320], [5, 2**40]])
    def test_ids_outside_the_vocabulary(self, engine: Engine, ids: list[int]) -> None:
        with pytest.raises(RequestError, match="between 0 and 319"):
            engine.generate(ids)
        assert len(list(engine.generate([0, 319], max_tokens=2, ignore_eos=True))) == 2

    @pytest.mark.parametrize(
        "sampling",
        [{"temperature": float("nan")}, {"max_tokens": 0}, {"top_p": "1"}, {"mode": "exact"}, {"n": 2}],
    )
    def test_wrong_sampling_is_refused_before_anything_runs(self, engine: Engine, sampling: dict[str, Any]) -> None:
        with pytest.raises(RequestError, match=next(iter(sampling))):
            engine.generate([5], **sampling)

    def test_stats(self, engine: Engine) -> None:
        tokens = list(engine.generate(prompt_of(150), max_tokens=5, ignore_eos=True))
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.generated_tokens) == (150, len(tokens))
        assert stats.layers_executed == 4 * (150 + 4)  # the last token is not run
        assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
        stats.prompt_tokens = 0
        assert engine.stats().prompt_tokens == 150


class TestFailures:
    def test_not_finite_logits_are_named(self, bundle: Path, tmp_path: Path, tiny_engine: Load) -> None:
        broken = shutil.copytree(bundle, tmp_path / "broken")
        weights = broken / "block_01.bin"
        weights.write_bytes(b"\xff" * weights.stat().st_size)
        engine = tiny_engine(broken, check_hashes=False)
        for temperature in (0.0, 1.0):
            with pytest.raises(EexportError, match="non-finite logits .* position 3"):
                list(engine.generate([5, 6, 7], temperature=temperature))

    def test_fake_backend(self, bundle: Path) -> None:
        engine = Engine.load(bundle, backend=FakeBackend(lambda token: (token + 1) % 320))
        assert ids_of(engine.generate([5], max_tokens=4)) == [6, 7, 8, 9]
        assert ids_of(engine.generate([5, 6, 7, 9], max_tokens=2)) == [10, 11]
        assert engine.stats().reused_tokens == 3
        assert ids_of(engine.generate(prompt_of(140) + [50], max_tokens=2)) == [51, 52]

    @pytest.mark.parametrize(
        ("failure", "expected"), [(KeyboardInterrupt(), KeyboardInterrupt), (MemoryError(), DeviceError)]
    )
    def test_a_step_that_fails_leaves_the_engine_usable(
        self, bundle: Path, failure: BaseException, expected: type[BaseException]
    ) -> None:
        armed = [True]

        def following(token: int) -> int:
            if token == 30 and armed:
                armed.clear()
                raise failure
            return token + 1

        engine = Engine.load(bundle, backend=FakeBackend(following))
        request = engine.generate([25, 26, 27], max_tokens=10)
        assert ids_of([next(request), next(request)]) == [28, 29]
        next(request)
        with pytest.raises(expected) as caught:
            next(request)
        if expected is DeviceError:
            assert "6 tokens" in str(caught.value)
        assert ids_of(engine.generate([25, 26, 27, 28], max_tokens=3)) == [29, 30, 31]
        assert engine.stats().reused_tokens == 0

    def test_a_device_that_is_not_there(self, bundle: Path) -> None:
        with pytest.raises(DeviceError, match="--device cuda"):
            Engine.load(bundle, device="cuda")
        with pytest.raises(DeviceError, match="--device tpu"):
            Engine.load(bundle, device="tpu")


class TestPlaces:
    def test_any_path_will_do(self, bundle: Path, tmp_path: Path, tiny_engine: Load) -> None:
        moved = shutil.copytree(bundle, tmp_path / "Modèle 模型 #1" / "b%20 'q'")
        tokens = ids_of(tiny_engine(moved).generate(prompt_of(9), max_tokens=5))
        assert tokens == ids_of(tiny_engine(bundle).generate(prompt_of(9), max_tokens=5))

    def test_a_relative_path_from_elsewhere(
        self, bundle: Path, tiny_engine: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(bundle.parent)
        assert list(tiny_engine(Path(bundle.name)).generate([5], max_tokens=2))

    def test_nothing_is_written(
        self, bundle: Path, tmp_path: Path, tiny_engine: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy, home = shutil.copytree(bundle, tmp_path / "copy"), tmp_path / "home"
        home.mkdir()
        monkeypatch.chdir(home)
        monkeypatch.setenv("HOME", str(home))
        before = {path: path.stat().st_mtime_ns for path in [copy, *copy.iterdir()]}
        list(tiny_engine(copy).generate("hello", max_tokens=5))
        assert {path: path.stat().st_mtime_ns for path in [copy, *copy.iterdir()]} == before
        assert not list(home.iterdir())
