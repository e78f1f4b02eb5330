import random

import pytest

from eexport.runtime.stops import StopMatcher


def run(stops, deltas):
    """What comes out, whether it was stopped, and the text given out after each delta."""
    matcher, out = StopMatcher(stops), []
    for delta in deltas:
        text, stopped = matcher.push(delta)
        out.append(text)
        if stopped:
            break
    out.append(matcher.flush())
    return "".join(out), matcher.matched, out


@pytest.mark.parametrize("deltas", [["one END two"], ["one ", "E", "N", "D two"], list("one END two"), ["one EN", "D"]])
def test_a_stop_string_across_tokens(deltas):
    text, stopped, out = run(["END"], deltas)
    assert (text, stopped) == ("one ", True)
    assert not any("E" in delta for delta in out)


def test_text_that_can_be_no_stop_string_is_not_held():
    assert run(["\n\n"], ["a", "\n", "b", "c"])[2] == ["a", "", "\nb", "c", ""]


def test_a_false_start_at_the_end_is_given_out():
    assert run(["END"], ["the E", "N"])[:2] == ("the EN", False)


def test_no_stops_hold_nothing():
    assert run([], ["a", "", "b"]) == ("ab", False, ["a", "", "b", ""])


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (["ab", "abc"], "xabc", "x"),
        (["bc", "xabcd"], "xabcd", ""),
        (["bc", "xabcd"], "xabce", "xa"),
        (["bc", "xabcd"], "xabc", "xa"),
        (["aab"], "aaab", "a"),
        (["abab", "ba"], "abac", "a"),
        (["\n\nUser:", "\n\n"], "hi\n\nUser: x", "hi"),
        (["😀"], "ok😀", "ok"),
    ],
)
def test_the_first_to_start_wins(stops, text, kept, cut):
    deltas = [text[i : i + cut] for i in range(0, len(text), cut)]
    assert run(stops, deltas)[:2] == (kept, True)


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


def test_the_result_does_not_depend_on_the_cuts():
    rng = random.Random(3)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randrange(20)))
        deltas, rest = [], text
        while rest:
            size = rng.randrange(4)
            deltas.append(rest[:size])
            rest = rest[size:]
        starts = [start for stop in stops if (start := text.find(stop)) >= 0]
        assert run(stops, deltas)[:2] == (text[: min(starts, default=len(text))], bool(starts))
