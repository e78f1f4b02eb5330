"""Exit heads in training, against computations of one row at a time."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eexport.calibration.batches import head_features, make_batch
from eexport.calibration.corpus import Corpus
from eexport.calibration.heads import DraftVocabulary, HeadForm, HeadTask, draft_vocabulary, fast_matmuls, scores
from eexport.models.checkpoint import Checkpoint, open_checkpoint
from eexport.models.decoder import LayerKV, rms_norm, rope_tables
from eexport.models.exit_decoder import exit_hidden, exit_logits
from eexport.models.exits import ExitHead, head_shapes

EXIT = HeadForm("exit_04", 4, ("hidden",))
LAST = HeadForm("last", 6, ("previous", "embedding"), passes=4)
MIXED = HeadForm("mixed", 4, ("hidden", "previous", "hidden.2"), passes=3)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products in fp32 whatever the CPU offers."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)


@pytest.fixture(scope="module")
def draft(corpus: Corpus) -> DraftVocabulary:
    return draft_vocabulary(corpus, range(60), 60, 320)


def random_values(checkpoint: Checkpoint, form: HeadForm) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        + (len(shape) == 1)
        for name, shape in head_shapes(checkpoint.spec, form.features).items()
    }


def said_by(corpus: Corpus, number: int) -> list[int]:
    return [int(token) for token in corpus[number].top_ids[:, 0]]


class TestDraftVocabulary:
    def test_it_is_what_the_model_says_most_often(self, corpus: Corpus) -> None:
        numbers = corpus.of("train")
        # Rows of the template's beginning, the first of these texts, do not count.
        counts = Counter(token for number in numbers for token in said_by(corpus, number)[1:])
        chosen = draft_vocabulary(corpus, numbers, 40, 320)
        ids = chosen.ids.tolist()
        assert len(ids) == 40 and ids == sorted(set(ids)) and chosen.ids.dtype == np.int32
        assert min(counts[token] for token in ids) >= max(n for token, n in counts.items() if token not in ids)
        assert chosen.index[chosen.ids.astype(int)].tolist() == list(range(40))
        assert (chosen.index >= 0).sum() == 40

    def test_what_was_never_said_comes_by_its_id(self, corpus: Corpus) -> None:
        said = {token for token in said_by(corpus, 0)[1:]}
        ids = draft_vocabulary(corpus, [0], len(said) + 5, 320).ids.tolist()
        unsaid = [token for token in range(320) if token not in said]
        assert set(ids) == said | set(unsaid[:5])
        assert draft_vocabulary(corpus, [0], 320, 320).ids.tolist() == list(range(320))


class TestFirstValues:
    def test_an_exit_begins_as_the_models_own_norm_and_head(
        self, corpus: Corpus, opened: Checkpoint, draft: DraftVocabulary
    ) -> None:
        task, batch = HeadTask(opened, EXIT, draft), make_batch(corpus, [3, 4])
        (logits,) = task.logits(task.first_values(opened, 0), batch)
        norm, table = (torch.from_numpy(opened.weights.read(f"model.{n}.weight")) for n in ("norm", "embed_tokens"))
        expected = F.linear(rms_norm(batch.hidden(4), norm, opened.spec.rms_norm_eps), table)
        assert torch.allclose(logits, expected[..., torch.from_numpy(draft.ids).long()], atol=1e-5)
        assert logits.std() > 0.3

    def test_several_features_begin_as_the_first(self, opened: Checkpoint, draft: DraftVocabulary) -> None:
        task = HeadTask(opened, LAST, draft)
        values = task.first_values(opened, 0)
        assert {name: tuple(value.shape) for name, value in values.items()} == head_shapes(opened.spec, LAST.features)
        fuse = values["fuse.weight"]
        assert torch.equal(fuse[:, :64], torch.eye(64)) and 0.005 < fuse[:, 64:].std() < 0.02
        assert torch.equal(fuse, task.first_values(opened, 0)["fuse.weight"])
        assert not torch.equal(fuse, task.first_values(opened, 1)["fuse.weight"])
        features = [torch.randn(1, 5, 64), torch.randn(1, 5, 64)]
        cos, sin = rope_tables(opened.spec.rope, torch.arange(5)[None])
        hidden = exit_hidden(opened.spec, values, features, cos, sin, LayerKV())
        ones = torch.ones(64)
        normed = torch.cat([rms_norm(feature, ones, opened.spec.rms_norm_eps) for feature in features], dim=-1)
        assert torch.allclose(hidden, F.linear(normed, fuse), atol=1e-6), "the layer adds nothing"
        # What does not come out yet is the model's last layer, to begin from.
        last = torch.from_numpy(opened.weights.read("model.layers.5.mlp.gate_proj.weight"))
        assert torch.equal(values["mlp.gate_proj.weight"], last)

    def test_they_belong_to_nobody_else(self, opened: Checkpoint, draft: DraftVocabulary) -> None:
        task = HeadTask(opened, EXIT, draft)
        before = task.first_values(opened, 0)
        for value in task.first_values(opened, 0).values():
            value.zero_()
        for name, value in task.first_values(opened, 0).items():
            assert torch.equal(value, before[name])


class TestLogits:
    @pytest.mark.parametrize("form", [LAST, MIXED])
    def test_a_drafts_tokens_see_what_they_would_on_a_device(
        self, form: HeadForm, corpus: Corpus, opened: Checkpoint, draft: DraftVocabulary
    ) -> None:
        """Every draft of a text by itself: true rows up to its first, then its own hidden states."""
        values, task = random_values(opened, form), HeadTask(opened, form, draft)
        spec, (number, other) = opened.spec, (11, 30)
        batch = make_batch(corpus, [other, number])
        found = task.logits(values, batch)
        assert len(found) == form.passes
        alone = make_batch(corpus, [number])
        rows = alone.tokens.shape[1]
        table = torch.from_numpy(opened.weights.read("model.embed_tokens.weight"))
        features = head_features(alone, form.features, form.depth, spec.num_layers, table)
        draft_rows = table[torch.from_numpy(draft.ids).long()]

        def run(at: int, end: int, kv: LayerKV, previous: Tensor | None) -> Tensor:
            cos, sin = rope_tables(spec.rope, torch.arange(at, end)[None])
            read = [
                previous if name == "previous" and previous is not None else feature[:, at:end]
                for name, feature in zip(form.features, features, strict=True)
            ]
            return exit_hidden(spec, values, read, cos, sin, kv)

        moved = []
        for begin in range(rows):
            kv = LayerKV()
            hidden = run(0, begin + 1, kv, None)[:, -1:]
            for step in range(min(form.passes, rows - begin)):
                if step:
                    hidden = run(begin + step, begin + step + 1, kv, previous=hidden)
                expected = exit_logits(spec, values, hidden, draft_rows)[0, 0]
                assert torch.allclose(found[step][1, begin + step], expected, atol=2e-4), (begin, step)
                moved.append(float((found[step] - found[0])[1, begin + step].abs().max()))
        assert max(moved) > 0.1, "a draft's own states make no difference"

    def test_texts_do_not_see_each_other(self, corpus: Corpus, opened: Checkpoint, draft: DraftVocabulary) -> None:
        values, task = random_values(opened, LAST), HeadTask(opened, LAST, draft)
        together = task.logits(values, make_batch(corpus, [3, 17, 40]))
        for place, number in enumerate((3, 17, 40)):
            for one, all_of_them in zip(task.logits(values, make_batch(corpus, [number])), together, strict=True):
                assert torch.allclose(all_of_them[place, : one.shape[1]], one[0], atol=1e-4)

    def test_an_untied_model_has_a_head_of_its_own(
        self, corpus: Corpus, tiny_checkpoint: Callable[..., Path], draft: DraftVocabulary
    ) -> None:
        untied = open_checkpoint(tiny_checkpoint(layers=6, tied=False))
        task, batch = HeadTask(untied, EXIT, draft), make_batch(corpus, [3])
        norm, table = (torch.from_numpy(untied.weights.read(f"{name}.weight")) for name in ("model.norm", "lm_head"))
        expected = F.linear(rms_norm(batch.hidden(4), norm, untied.spec.rms_norm_eps), table)
        (found,) = task.logits(task.first_values(untied, 0), batch)
        assert torch.allclose(found, expected[..., torch.from_numpy(draft.ids).long()], atol=1e-5)


class TestLoss:
    @pytest.mark.parametrize("form", [EXIT, LAST])
    def test_by_hand(self, form: HeadForm, corpus: Corpus, opened: Checkpoint, draft: DraftVocabulary) -> None:
        values, task, numbers = random_values(opened, form), HeadTask(opened, form, draft), [2, 30, 31]
        passes = [logits.double().numpy() for logits in task.logits(values, make_batch(corpus, numbers))]
        places = {int(token): place for place, token in enumerate(draft.ids)}
        means, left_out = [], 0
        for logits in passes:
            losses = []
            for row, number in enumerate(numbers):
                text = corpus[number]
                for t in range(text.info.first, text.info.length):
                    ids, logprobs = text.top_ids[t].tolist(), text.top_logprobs[t].astype(float).tolist()
                    if ids[0] not in places:
                        left_out += 1
                        continue
                    wanted = {places[i]: math.exp(p) for i, p in zip(ids, logprobs, strict=True) if i in places}
                    total = sum(wanted.values())
                    scale = np.log(np.exp(logits[row, t] - logits[row, t].max()).sum()) + logits[row, t].max()
                    losses.append(-sum(p / total * (logits[row, t, i] - scale) for i, p in wanted.items()))
            means.append(sum(losses) / len(losses))
        assert left_out, "every token is in the draft vocabulary"
        assert float(task.loss(values, make_batch(corpus, numbers))) == pytest.approx(np.mean(means), rel=1e-5)

    def test_it_has_a_gradient_everywhere(self, corpus: Corpus, opened: Checkpoint, draft: DraftVocabulary) -> None:
        values = {name: value.requires_grad_() for name, value in random_values(opened, LAST).items()}
        torch.autograd.backward(HeadTask(opened, LAST, draft).loss(values, make_batch(corpus, [2, 30])))
        for name, value in values.items():
            assert value.grad is not None and value.grad.isfinite().all() and value.grad.abs().max() > 0, name


class TestScores:
    def test_by_hand(self, corpus: Corpus, opened: Checkpoint, draft: DraftVocabulary, exact: None) -> None:
        form = HeadForm("near", 6, ("hidden", "previous"), passes=3)
        task = HeadTask(opened, form, draft)
        values = {name: value + 0.02 for name, value in task.first_values(opened, 0).items()}
        head = ExitHead("near", 6, form.features, {name: value.numpy() for name, value in values.items()})
        numbers = [40, 3, 17, 25, 8]
        found = scores(task, head, corpus, numbers, size=2)
        shares = []
        for number, one in zip(numbers, found, strict=True):
            text = corpus[number]
            answer = range(text.info.answer - 1, text.info.length)
            passes = [logits[0].double() for logits in task.logits(values, make_batch(corpus, [number]))]
            said = [[int(draft.ids[int(logits[t].argmax())]) for t in answer] for logits in passes]
            assert one.agrees.tolist() == [
                [token == text.top_ids[t, 0] for token, t in zip(tokens, answer, strict=True)] for tokens in said
            ]
            logprobs = torch.log_softmax(passes[0], -1)
            assert one.entropy == pytest.approx((-(logprobs.exp() * logprobs).sum(-1))[answer].numpy(), abs=1e-4)
            shares.append(one.agrees.mean())
        assert 0.1 < np.mean(shares) < 0.9

    def test_a_head_that_is_the_model_agrees_everywhere(self, corpus: Corpus, opened: Checkpoint, exact: None) -> None:
        form = HeadForm("whole", 6, ("hidden",))
        task = HeadTask(opened, form, DraftVocabulary(np.arange(320, dtype=np.int32), 320))
        values = {name: value.numpy() for name, value in task.first_values(opened, 0).items()}
        found = scores(task, ExitHead("whole", 6, ("hidden",), values), corpus, range(60))
        agreed = np.concatenate([one.agrees[0] for one in found])
        assert agreed.mean() > 0.97  # the states are rounded to bfloat16
        entropy = np.concatenate([one.entropy for one in found])
        expected = np.concatenate([corpus[n].entropy[corpus[n].answer_rows] for n in range(60)])
        assert entropy == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("offered", [{}, {"avx512_bf16": True}, {"avx512_bf16": False, "avx2": True}])
def test_matmuls_are_fast_where_the_cpu_is(offered: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: offered)
    with fast_matmuls():
        product = torch.randn(4, 4) @ torch.randn(4, 4)
    assert product.dtype == (torch.bfloat16 if offered.get("avx512_bf16") else torch.float32)
