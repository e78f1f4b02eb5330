"""Beginnings of prompts that the model completes."""

import json
import re
from collections import Counter

import pytest

from eexport.calibration import synthesis
from eexport.calibration.synthesis import Beginnings

KINDS = ("code", "json", "math", "text")


def test_kinds_take_turns_and_each_beginning_stands_alone() -> None:
    beginnings = Beginnings(7)
    found = [beginnings[index] for index in range(400)]
    assert [one.kind for one in found[:8]] == [*KINDS, *KINDS]
    assert Beginnings(7)[399] == found[399]
    assert Counter(one.kind for one in found) == dict.fromkeys(KINDS, 100)
    other = Beginnings(8)
    assert sum(other[index] == found[index] for index in range(400)) < 40


def test_places_are_filled_with_words_that_differ() -> None:
    places = json.loads(synthesis._FILE.read_text(encoding="utf-8"))["places"]
    beginnings = Beginnings(0)
    listed = 0
    for index in range(800):
        one = beginnings[index]
        assert not {name for name in re.findall(r"\{(\w+)\}", one.text) if name in places}
        if "with the keys" in one.text:
            keys = re.findall(r'"(\w+)"', one.text)
            listed += len(keys) > 2
            assert len(set(keys)) == len(keys)
    assert listed


def test_every_pattern_has_words_for_its_places_and_braces_of_code_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(synthesis._FILE.read_text(encoding="utf-8"))
    places = found.pop("places")
    assert tuple(sorted(found)) == KINDS
    for kind, patterns in found.items():
        assert len(set(patterns)) == len(patterns) >= 10, kind
        for pattern in patterns:
            unknown = set(re.findall(r"\{(\w+)\}", pattern)) - places.keys()
            assert not unknown, f"{pattern!r} asks for {unknown}"
    beginnings = Beginnings(0)
    monkeypatch.setattr(beginnings, "_patterns", {kind: ["int f() {x} of {number}"] for kind in KINDS})
    assert re.fullmatch(r"int f\(\) \{x\} of \d+", beginnings[0].text)


def test_more_places_than_words_begin_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    beginnings = Beginnings(0)
    monkeypatch.setattr(beginnings, "_patterns", {kind: ["{a} {a} {a} {a}"] for kind in KINDS})
    monkeypatch.setattr(beginnings, "_places", {"a": ["x", "y"]})
    words = beginnings[3].text.split()
    assert set(words[:2]) == set(words[2:]) == {"x", "y"}
