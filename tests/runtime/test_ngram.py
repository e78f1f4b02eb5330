"""Prompt lookup against a search through the whole text."""

import random
from collections.abc import Sequence

import pytest

from eexport.runtime.ngram import NgramIndex


def index_of(tokens: Sequence[int], longest: int = 5, shortest: int = 2) -> NgramIndex:
    index = NgramIndex(longest, shortest)
    index.extend(tokens)
    return index


def searched(tokens: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """What `propose` promises, by comparing every place, copying token by token into the proposal itself."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for _ in range(count):
                    text.append(text[end])
                    end += 1
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_it_finds_what_a_search_finds(alphabet: int) -> None:
    chance = random.Random(alphabet)
    for _ in range(150):
        tokens = chance.choices(range(alphabet), k=chance.randrange(40))
        shortest = chance.randint(1, 3)
        longest = shortest + chance.randrange(4)
        index, seen = NgramIndex(longest, shortest), 0
        while seen < len(tokens):  # in pieces, proposing in between
            step = chance.randint(1, 5)
            index.extend(tokens[seen : seen + step])
            seen = min(seen + step, len(tokens))
            count = chance.randrange(10)
            assert index.propose(count) == searched(tokens[:seen], longest, shortest, count)


def test_what_follows_the_longest_suffix_and_of_those_the_last() -> None:
    text = [1, 2, 3, 70, 9, 2, 3, 80, 9, 2, 3, 81, 7, 1, 2, 3]
    assert index_of(text, 3).propose(1) == [70]
    assert index_of(text, 2).propose(1) == [81]
    assert index_of(text, 3).propose(4) == [70, 9, 2, 3]


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_period_goes_on_for_ever(period: int) -> None:
    text = [index % period for index in range(2 * period + 2)]
    assert index_of(text).propose(20) == [(len(text) + index) % period for index in range(20)]


@pytest.mark.parametrize("text", [[], [5], [5, 5], [5, 6, 7, 8], [5, 6, 7, 5]])
def test_nothing_to_look_up(text: list[int]) -> None:
    assert index_of(text).propose(4) == []


def test_no_tokens_asked_for() -> None:
    assert index_of([1, 1, 1, 1]).propose(0) == []


def test_large_and_equal_hashes_are_told_apart() -> None:
    assert hash(-1) == hash(-2)
    assert index_of([-1, -1, 5, -2, -2, 6, -1, -1]).propose(1) == [5]


def test_proposing_changes_nothing() -> None:
    index = index_of([1, 2, 3, 1, 2])
    assert [index.propose(3) for _ in range(3)] == [[3, 1, 2]] * 3 and len(index) == 5


def test_trimmed_is_as_if_never_added() -> None:
    chance = random.Random(4)
    index, tokens = NgramIndex(4, 1), list[int]()
    for _ in range(500):
        if chance.random() < 0.6:
            new = chance.choices(range(3), k=chance.randrange(6))
            index.extend(new)
            tokens += new
        else:
            count = min(chance.randrange(8), len(tokens))
            index.trim(count)
            del tokens[len(tokens) - count :]
        assert len(index) == len(tokens)
        assert index.propose(6) == searched(tokens, 4, 1, 6)
    with pytest.raises(ValueError, match="cannot trim"):
        index.trim(len(tokens) + 1)


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (3, 0), (0, 0), (2, -1)])
def test_sizes_that_make_no_sense(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match="n-grams"):
        NgramIndex(longest, shortest)
