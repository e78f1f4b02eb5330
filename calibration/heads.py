"""Exit heads in training: their form, their first values, what they are asked to learn, and how well they do.

Legend: B texts, T rows, D hidden width, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eexport.calibration.batches import Batch, head_features, make_batch, shifted
from eexport.calibration.corpus import Corpus
from eexport.models.checkpoint import Checkpoint
from eexport.models.decoder import LayerKV, rope_tables
from eexport.models.exit_decoder import exit_hidden, exit_logits
from eexport.models.exits import ExitHead, head_shapes

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class HeadForm:
    """What a head reads, see ``models.exits.ExitHead``, and how many tokens of a draft it is trained on.

    More than one makes a difference only where it reads ``previous``.
    """

    name: str
    depth: int
    features: tuple[str, ...]
    passes: int = 1


class DraftVocabulary:
    """The tokens that heads can say.

    Attributes:
        ids: [Vd], rising.
        index: [V] place among them, or -1.
    """

    def __init__(self, ids: NDArray[np.int32], vocab_size: int) -> None:
        self.ids = ids
        self.index = torch.full((vocab_size,), -1)
        self.index[torch.from_numpy(ids).long()] = torch.arange(len(ids))


def ranked_tokens(corpus: Corpus, numbers: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """All token ids, those first that the model itself says most often; what it never said comes by its id."""
    counts = np.zeros(vocab_size, np.int64)
    for number in numbers:
        text = corpus[number]
        np.add.at(counts, text.top_ids[text.info.first :, 0], 1)
    return np.argsort(-counts, kind="stable")


def draft_vocabulary(corpus: Corpus, numbers: Sequence[int], size: int, vocab_size: int) -> DraftVocabulary:
    """The first ``size`` of the ranked tokens."""
    ranked = ranked_tokens(corpus, numbers, vocab_size)[:size]
    return DraftVocabulary(np.sort(ranked).astype(np.int32), vocab_size)


class HeadTask:
    """One head's forward pass, loss and score on texts of a corpus."""

    def __init__(self, checkpoint: Checkpoint, form: HeadForm, draft: DraftVocabulary) -> None:
        """Read what the head shares with the model."""
        spec, weights = checkpoint.spec, checkpoint.weights
        self.form, self.draft, self._spec = form, draft, spec
        self._embedding = torch.from_numpy(weights.read("model.embed_tokens.weight"))
        table = self._embedding if spec.tie_word_embeddings else torch.from_numpy(weights.read("lm_head.weight"))
        self._draft_rows = table[torch.from_numpy(draft.ids).long()]

    def first_values(self, checkpoint: Checkpoint, seed: int) -> dict[str, Tensor]:
        """The model's last layer and final norm, with the layer's two outputs at zero: it begins as the identity.

        Begun as the last layer itself, training ended 3-5 points of agreement lower, at half the rate.
        """
        spec, weights = self._spec, checkpoint.weights
        generator = torch.Generator().manual_seed(seed)
        values = {}
        for name, shape in head_shapes(spec, self.form.features).items():
            if name == "fuse.weight":
                value = torch.randn(shape, generator=generator) * 0.01
                value[:, : shape[0]] = torch.eye(shape[0])
            elif name.startswith("fuse_norm."):
                value = torch.ones(shape)
            elif name == "norm.weight":
                value = torch.from_numpy(weights.read("model.norm.weight"))
            elif name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                value = torch.zeros(shape)
            else:
                value = torch.from_numpy(weights.read(f"model.layers.{spec.num_layers - 1}.{name}"))
            values[name] = value.clone()
        return values

    def logits(self, tensors: Tensors, batch: Batch) -> list[Tensor]:
        """[B, T, Vd] for each of ``form.passes`` drafted tokens.

        At row t, pass j is what the head says there as the j-th token of a draft. Where the head reads the last hidden
        state of the position before, that is not known from the second token on, and the head's own output stands in
        for it. The rows before a draft's first keep the keys of the first pass (EAGLE-3's training-time test,
        arXiv 2503.01840).
        """
        last, rows = self._spec.num_layers, batch.tokens.shape[1]
        features = head_features(batch, self.form.features, self.form.depth, last, self._embedding)
        cos, sin = rope_tables(self._spec.rope, torch.arange(rows)[None])
        kv, result = LayerKV(), []
        for step in range(self.form.passes):
            visible = None if not step else _visible(rows, step)
            hidden = exit_hidden(self._spec, tensors, features, cos, sin, kv, visible)
            result.append(exit_logits(self._spec, tensors, hidden, self._draft_rows))
            features = [
                shifted(hidden) if name == "previous" else feature
                for name, feature in zip(self.form.features, features, strict=True)
            ]
        return result

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Cross-entropy to the full model's likeliest tokens, in nats, over the rows that count.

        The targets are the model's probabilities of its likeliest tokens, as far as these are in the draft vocabulary,
        scaled to sum to 1. Rows whose likeliest token is not in it are left out.
        """
        wanted = self.draft.index[batch.top_ids[batch.counted]]  # [N, K]
        known = wanted >= 0
        rows = known[:, 0]
        weights = (batch.top_logprobs[batch.counted].exp() * known)[rows]
        weights = weights / weights.sum(-1, keepdim=True)
        wanted = wanted[rows].clamp_min(0)
        losses = []
        for logits in self.logits(tensors, batch):
            logprobs = torch.log_softmax(logits[batch.counted][rows].float(), dim=-1)
            losses.append(-(logprobs.gather(1, wanted) * weights).sum(-1).mean())
        return torch.stack(losses).mean()


def _visible(rows: int, step: int) -> Tensor:
    """[1, 1, T, (step + 1) · T]: a draft's token sees itself and those drafted before it, and true rows before those.

    Pass i at row t - step + i is what the i-th token of the draft left there; pass 0 is what true rows left.
    """
    place = torch.arange(rows)
    behind = place[:, None] - place  # [T, T] how far row s lies behind row t
    passes = [behind >= step, *(behind == step - done for done in range(1, step + 1))]
    return torch.cat(passes, dim=1)[None, None]


@dataclass(frozen=True)
class Scores:
    """What a head does on the N rows of one text's answer.

    Attributes:
        agrees: [passes, N] whether its token, as the j-th of a draft, is the full model's.
        entropy: [N] of its distribution over the draft vocabulary as a first token, in nats.
    """

    agrees: NDArray[np.bool_]
    entropy: NDArray[np.float32]


def scores(task: HeadTask, head: ExitHead, corpus: Corpus, numbers: Sequence[int], size: int = 16) -> list[Scores]:
    """Scores of the texts of these numbers, in their order."""
    tensors = {name: torch.from_numpy(value) for name, value in head.tensors.items()}
    found: dict[int, Scores] = {}
    ordered = sorted(numbers, key=lambda number: corpus.infos[number].length)
    ids = torch.from_numpy(task.draft.ids).long()
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        batch = make_batch(corpus, part)
        with torch.inference_mode(), fast_matmuls():
            passes = [logits.float() for logits in task.logits(tensors, batch)]
            said = [ids[logits.argmax(-1)] for logits in passes]
            logprobs = torch.log_softmax(passes[0], dim=-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        for row, number in enumerate(part):
            answer = batch.texts[row].answer_rows
            agrees = [(tokens[row] == batch.top_ids[row, :, 0])[answer].numpy() for tokens in said]
            found[number] = Scores(np.stack(agrees), entropy[row, answer].numpy())
    return [found[number] for number in numbers]


@contextmanager
def fast_matmuls() -> Iterator[None]:
    """Matrix products in bfloat16 where the CPU computes it natively, 4-5 times faster; elsewhere in fp32."""
    found = torch.cpu.get_capabilities()
    native = any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=native):
        yield
