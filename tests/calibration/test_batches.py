"""Texts as padded tensors."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from eexport.calibration.batches import head_features, in_turn, make_batch, shifted
from eexport.calibration.corpus import Corpus
from eexport.models.checkpoint import Checkpoint


def test_texts_are_padded_at_their_ends(corpus: Corpus) -> None:
    numbers = [7, 30, 2]
    batch = make_batch(corpus, numbers)
    longest = max(corpus.infos[number].length for number in numbers)
    assert len({corpus.infos[number].length for number in numbers}) > 1
    assert batch.tokens.shape == (3, longest) and batch.top_ids.shape == (3, longest, 8)
    for row, number in enumerate(numbers):
        text, length = corpus[number], corpus.infos[number].length
        assert batch.tokens[row, :length].tolist() == text.tokens.tolist()
        assert np.array_equal(batch.top_ids[row, :length], text.top_ids)
        assert np.array_equal(batch.top_logprobs[row, :length], text.top_logprobs.astype(np.float32))
        assert batch.counted[row].tolist() == [0 < place < length for place in range(longest)]
        states = batch.hidden(4)[row]
        assert not states[length:].any()
        bits = states[:length].bfloat16().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, text.hidden[4])


def test_features_by_name(corpus: Corpus, opened: Checkpoint) -> None:
    batch, table = make_batch(corpus, [5, 9]), torch.from_numpy(opened.weights.read("model.embed_tokens.weight"))
    names = ("hidden", "previous", "embedding", "hidden.2")
    own, previous, embedding, second = head_features(batch, names, 4, 6, table)
    assert torch.equal(own, batch.hidden(4)) and torch.equal(second, batch.hidden(2))
    assert torch.equal(previous[:, 1:], batch.hidden(6)[:, :-1]) and not previous[:, 0].any()
    assert torch.equal(previous, shifted(batch.hidden(6)))
    assert torch.equal(embedding[1, 3], table[int(corpus[9].tokens[3])])


@pytest.mark.parametrize("count", [8, 19, 3])
def test_each_pass_takes_every_text_once(count: int, corpus: Corpus) -> None:
    numbers = list(range(0, 2 * count, 2))
    groups = -(-count // 4)
    found = list(islice(in_turn(corpus, numbers, 4, seed=3), 5 * groups))
    for start in range(0, len(found), groups):
        one_pass = found[start : start + groups]
        assert Counter(number for group in one_pass for number in group) == dict.fromkeys(numbers, 1)
        for group in one_pass:  # of about one length
            lengths = [corpus.infos[number].length for number in group]
            beside = [corpus.infos[number].length for number in numbers if number not in group]
            assert not any(min(lengths) < length < max(lengths) for length in beside)
    assert found == list(islice(in_turn(corpus, numbers, 4, seed=3), len(found)))
    if groups > 2:
        orders = {str(found[start : start + groups]) for start in range(0, len(found), groups)}
        assert len(orders) > 1
        assert found != list(islice(in_turn(corpus, numbers, 4, seed=4), len(found)))
