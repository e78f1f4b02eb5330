"""Texts that a model writes: against the engine and torch, in any company, interrupted and gone on with."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from eexport.calibration import generate as module
from eexport.calibration.corpus import TOP, Corpus, Text
from eexport.calibration.data import Encoded, Prompt, prompt_key
from eexport.calibration.generate import Job, Lengths, divide, generate
from eexport.calibration.slots import Slots
from eexport.models.checkpoint import Checkpoint
from eexport.models.decoder import Decoder, LayerKV, rope_tables
from eexport.runtime.backend_ort import OrtBackend
from eexport.runtime.engine import Engine
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import read_manifest

Make = Callable[..., Path]
WriteTexts = Callable[..., Corpus]

ANSWER, MESSAGE = 10, 8
LENGTHS = Lengths(ANSWER, MESSAGE)
CLOSING = (2, 7, 1)


def prompts(count: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(1)
    return [tuple(random.integers(3, 300, random.integers(1, 12)).tolist()) for _ in range(count)]


def whole(count: int) -> list[Job]:
    return [Job("text", "made", ids, 0) for ids in prompts(count)]


def begun(count: int) -> list[Job]:
    return [Job("text", "written", (1, *ids), 1, CLOSING, seed) for seed, ids in enumerate(prompts(count))]


def same(one: Text, other: Text) -> bool:
    arrays = [(one.hidden[depth], other.hidden[depth]) for depth in one.hidden]
    arrays += [(getattr(one, name), getattr(other, name)) for name in ("tokens", "top_ids", "top_logprobs", "entropy")]
    return one.info == other.info and all(np.array_equal(a, b) for a, b in arrays)


def torch_states(checkpoint: Checkpoint, tokens: NDArray[np.int32]) -> tuple[list[Tensor], Tensor]:
    """Hidden states [T, D] by depth, and logits [T, V]."""
    decoder = Decoder.from_weights(checkpoint.spec, checkpoint.weights)
    cos, sin = rope_tables(checkpoint.spec.rope, torch.arange(len(tokens))[None])
    states = [decoder.embed(torch.tensor(tokens[None]).long())]
    for layer in decoder.layers:
        states.append(layer(states[-1], cos, sin, LayerKV()))
    return [state[0] for state in states], decoder.head(states[-1])[0]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestAnswers:
    def test_they_are_the_engines(
        self, two_exits: Path, six_layers: Path, tiny_checkpoint: Make, tiny_bundle: Make, write_texts: WriteTexts,
        tiny_engine: Callable[..., Engine], tmp_path: Path,
    ) -> None:  # fmt: skip
        free = write_texts(two_exits, tmp_path / "free", whole(12))
        answers = [free[i].tokens[free.infos[i].answer :].tolist() for i in range(12)]
        ending = answers[3][4]
        bundle = tiny_bundle(tiny_checkpoint(layers=6, generation={"eos_token_id": [2, ending]}), blocks="2,4")
        ended = write_texts(bundle, tmp_path / "ended", whole(12))
        stopped = 0
        for place, corpus in ((two_exits, free), (bundle, ended)):
            engine = tiny_engine(place)
            for number, prompt in enumerate(prompts(12)):
                text = corpus[number]
                assert text.info.answer == len(prompt) and tuple(text.tokens[: len(prompt)]) == prompt
                said = [token.token_id for token in engine.generate(prompt, max_tokens=ANSWER, temperature=0)]
                if said[-1] in engine.manifest.model.eos_token_ids:
                    stopped += 1
                    assert text.top_ids[-1, 0] == said.pop()
                assert text.tokens[text.info.answer :].tolist() == said
                # Each row names what comes next: the answer, and what would have come after it.
                assert text.top_ids[text.answer_rows, 0].tolist()[: len(said)] == said
                assert len(text.tokens) == text.info.length == len(text.entropy)
        assert 0 < stopped < 24

    def test_an_answer_may_be_empty(
        self, two_exits: Path, backend: OrtBackend, write_texts: WriteTexts, tmp_path: Path
    ) -> None:
        first = int(write_texts(two_exits, tmp_path / "free", whole(1))[0].tokens[len(prompts(1)[0])])
        manifest = read_manifest(two_exits)
        manifest = dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, eos_token_ids=(first,)))
        corpus = Corpus(tmp_path / "texts", {})
        generate(Slots(two_exits, manifest, backend, 2, 30), whole(1), corpus, LENGTHS, lambda *_: None)
        text = corpus[0]
        assert text.info.answer == text.info.length and text.top_ids[text.answer_rows, 0].tolist() == [first]

    def test_states_and_probabilities_are_torchs(
        self, two_exits: Path, opened: Checkpoint, write_texts: WriteTexts, tmp_path: Path
    ) -> None:
        corpus = write_texts(two_exits, tmp_path / "texts", whole(5))
        for number in range(5):
            text = corpus[number]
            states, logits = torch_states(opened, text.tokens)
            assert sorted(text.hidden) == [1, 2, 3, 4, 6]
            for depth, bits in text.hidden.items():
                found = torch.tensor(bits.view(np.int16)).view(torch.bfloat16)
                exact = states[depth].bfloat16()
                assert (found == exact).float().mean() > 0.97, "as near as bfloat16 is"
                assert torch.allclose(found.float(), states[depth], rtol=2**-8, atol=1e-4)
            logprobs = torch.log_softmax(logits, dim=-1)
            top = logprobs.topk(TOP)
            assert np.array_equal(text.top_ids, top.indices.numpy())
            assert text.top_logprobs == pytest.approx(top.values.numpy(), abs=4e-3)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            assert text.entropy == pytest.approx(entropy.numpy(), abs=1e-4)


class TestCompletion:
    def test_a_begun_prompt_is_completed_and_closed(
        self, two_exits: Path, write_texts: WriteTexts, tmp_path: Path
    ) -> None:
        jobs = begun(16)
        corpus = write_texts(two_exits, tmp_path / "texts", jobs)
        added = []
        for job, info, text in zip(jobs, corpus.infos, map(corpus.__getitem__, range(16)), strict=True):
            prompt = text.tokens[: info.answer].tolist()
            assert tuple(prompt[: len(job.ids)]) == job.ids and tuple(prompt[-3:]) == CLOSING
            message = prompt[len(job.ids) : -3]
            assert not {*message} & {CLOSING[0], 2}
            assert (info.key, info.first, info.source) == (prompt_key("text", prompt), 1, "written")
            assert info.split == divide(info.key)
            added.append(len(message))
        assert max(added) == MESSAGE - 1, "the closing stands where the longest message would go on"
        again = write_texts(
            two_exits, tmp_path / "again", [dataclasses.replace(job, seed=job.seed + 99) for job in jobs]
        )
        assert sum(again[i].tokens.tolist() == corpus[i].tokens.tolist() for i in range(16)) < 4

    def test_it_draws_from_the_nucleus(
        self, two_exits: Path, opened: Checkpoint, write_texts: WriteTexts, tmp_path: Path
    ) -> None:
        corpus = write_texts(two_exits, tmp_path / "texts", begun(30))
        likeliest, drawn = 0, 0
        for number in range(30):
            text = corpus[number]
            _, logits = torch_states(opened, text.tokens)
            begin = len(begun(30)[number].ids)
            for place in range(begin, text.info.answer - 3):
                values, ids = torch.softmax(logits[place - 1].double() / 0.8, -1).sort(descending=True)
                values = values[:50] / values[:50].sum()
                nucleus = ids[: int((values.cumsum(0) < 0.95 - 1e-4).sum()) + 1].tolist()
                token = int(text.tokens[place])
                assert token in nucleus
                drawn += 1
                likeliest += token == nucleus[0]
        assert drawn > 100 and 0.05 * drawn < likeliest < 0.95 * drawn

    def test_it_ends_where_the_model_closes_the_message(
        self, two_exits: Path, write_texts: WriteTexts, tmp_path: Path
    ) -> None:
        jobs = begun(10)
        free = write_texts(two_exits, tmp_path / "free", jobs)
        messages = [free[i].tokens[len(job.ids) : len(job.ids) + 3].tolist() for i, job in enumerate(jobs)]
        closed = [dataclasses.replace(job, closing=(said[2], 9)) for job, said in zip(jobs, messages, strict=True)]
        corpus = write_texts(two_exits, tmp_path / "texts", closed)
        for number, (job, said) in enumerate(zip(jobs, messages, strict=True)):
            ends = said.index(said[2])  # it may have said it before
            prompt = corpus[number].tokens[: corpus.infos[number].answer].tolist()
            assert prompt == [*job.ids, *said[:ends], said[2], 9]

    def test_a_prompt_that_is_reserved_is_for_that(
        self, two_exits: Path, write_texts: WriteTexts, tmp_path: Path
    ) -> None:
        """However it came about."""
        ids = prompts(30)
        training = [one for one in ids if divide(prompt_key("code", one)) == "train"]
        jobs = [Job("text", "held.jsonl", one, 0, split="test") for one in training]
        jobs += [Job("code", "written", one, 0) for one in training]
        corpus = write_texts(two_exits, tmp_path / "texts", jobs)
        assert len(training) > 10 and {info.split for info in corpus.infos} == {"test"}

    def test_a_prompt_has_one_split_as_whatever_kind(
        self, two_exits: Path, write_texts: WriteTexts, tmp_path: Path
    ) -> None:
        jobs = [Job(kind, "own.jsonl", one, 0) for kind in ("code", "math") for one in prompts(12)]
        infos = write_texts(two_exits, tmp_path / "texts", jobs).infos
        assert [info.split for info in infos[:12]] == [info.split for info in infos[12:]]
        assert len({info.split for info in infos}) > 1


class TestCompany:
    def test_a_text_does_not_depend_on_the_others(
        self, two_exits: Path, write_texts: WriteTexts, tmp_path: Path
    ) -> None:
        jobs = [*whole(9), *begun(9)]
        alone = write_texts(two_exits, tmp_path / "alone", jobs, slots=1)
        for slots in (2, 5, 32):
            found = write_texts(two_exits, tmp_path / str(slots), jobs, slots=slots)
            assert files(tmp_path / str(slots)) == files(tmp_path / "alone")
        found = write_texts(two_exits, tmp_path / "turned", jobs[::-1], slots=5)
        assert all(same(alone[i], found[17 - i]) for i in range(18))

    @pytest.mark.parametrize("interrupted_at", [(1,), (6, 7, 13), (11, 12)])
    def test_interrupted_and_gone_on_with(
        self, interrupted_at: Sequence[int], two_exits: Path, write_texts: WriteTexts, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(module, "SHARD", 4)
        jobs = [*whole(9), *begun(9)]
        write_texts(two_exits, tmp_path / "whole", jobs, slots=3)
        expected = files(tmp_path / "whole")
        assert len({name.partition("/")[0] for name in expected if "/" in name}) == 5
        for count in interrupted_at:

            def stop(done: int, total: int, at: int = count) -> None:
                assert total == 18
                if done >= at:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                write_texts(two_exits, tmp_path / "parts", jobs, slots=2 + count % 3, progress=stop)
            done = files(tmp_path / "parts")
            assert len(done) < len(expected) and done.items() <= expected.items()
        assert (tmp_path / "parts/shard-0000").exists() == (max(interrupted_at) > 4)
        write_texts(two_exits, tmp_path / "parts", jobs, slots=5)
        assert files(tmp_path / "parts") == expected

    def test_progress_counts_texts(self, two_exits: Path, write_texts: WriteTexts, tmp_path: Path) -> None:
        told = list[tuple[int, int]]()
        write_texts(two_exits, tmp_path / "texts", whole(9), slots=4, progress=lambda *at: told.append(at))
        assert told == sorted(told) and told[0] == (0, 9) and told[-1] == (9, 9)


def test_a_slot_that_is_full(two_exits: Path, backend: OrtBackend) -> None:
    slots = Slots(two_exits, read_manifest(two_exits), backend, 2, 3)
    for _ in range(3):
        slots.step([5, 6])
    with pytest.raises(ValueError, match="3 tokens"):
        slots.step([5, 6])
    slots.lengths[:] = 0
    slots.step([5, 6])


def test_activations_that_are_no_numbers(
    two_exits: Path, backend: OrtBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Slots.step

    def broken(self: Slots, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return np.where(self.lengths[:, None] == 4, np.nan, step(self, token_ids))

    monkeypatch.setattr(Slots, "step", broken)
    slots, corpus = Slots(two_exits, read_manifest(two_exits), backend, 2, 40), Corpus(tmp_path / "texts", {})
    with pytest.raises(EexportError, match=r"^tiny: the activations are not finite: [^\n]+$"):
        generate(slots, whole(3), corpus, LENGTHS, lambda *_: None)
    assert not len(corpus)


def test_prompts_are_divided_by_their_hash() -> None:
    random = np.random.default_rng(0)
    keys = [prompt_key("code", random.integers(0, 300, 8).tolist()) for _ in range(5000)]
    shares = Counter(map(divide, keys))
    for split, share in {"train": 0.65, "predictor": 0.1, "tune": 0.15, "test": 0.1}.items():
        assert shares[split] / 5000 == pytest.approx(share, abs=0.02)
    prompt = Prompt("code", "?", None, None, None, None, "", "made.jsonl:1")
    assert prompt_key("code", [4, 5]) == Encoded(prompt, (4, 5), cut=False).hash != prompt_key("text", [4, 5])
