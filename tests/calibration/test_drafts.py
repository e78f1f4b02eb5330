import numpy as np
import pytest
from toys import toy_costs

from eexport.calibration.drafts import Policy, Recorded, Replay, expected_accepted, looping_share


def _text(agrees: list[int], entropy: list[float] | None = None, prompt: tuple[int, ...] = ()) -> Recorded:
    """A text without repetitions, one exit after layer 2 of 4."""
    flags = np.array([[bool(flag), True] for flag in agrees])
    values = np.array([[value, 0.0] for value in entropy or [0.0] * len(agrees)], np.float32)
    return Recorded(prompt, tuple(range(100, 100 + len(agrees))), flags, values)


def test_full_runs_every_layer_for_every_token() -> None:
    tally = Replay(toy_costs())(Policy("full"), _text([1] * 11))
    assert (tally.rounds, tally.tokens, tally.drafted) == (10, 10, 0)
    assert tally.ms == pytest.approx(10 * (4 + 2 + 0.5))


def test_rounds_of_an_exit_by_hand() -> None:
    # Token 0 is the prefill's. Drafts of two: [1 1], then one verified; [0 .], one verified; [1 0], two in all.
    text = _text([1, 1, 1, 0, 0, 1, 0])
    tally = Replay(toy_costs())(Policy("exact", place=0, depth=2, length=2), text)
    assert (tally.rounds, tally.tokens, tally.drafted, tally.accepted) == (3, 6, 6, 3)
    # Three shallow passes, two looks through the head, the deep layers and the head for three rows at once.
    a_round = 3 * 2.0 + 2 * (2.0 + 0.5) + (2.0 + 2.0) * 1.2 + 0.5
    assert tally.ms == pytest.approx(3 * a_round)


def test_an_unsure_exit_drafts_no_further_but_has_looked() -> None:
    text = _text([1, 1, 1, 1, 1], entropy=[0.0, 0.0, 3.0, 0.0, 0.0])
    tally = Replay(toy_costs())(Policy("exact", place=0, depth=2, length=2, tau=1.0), text)
    # Token 1 drafted, token 2 is unsure and comes from verification; tokens 3 and 4 are drafted.
    assert (tally.rounds, tally.tokens, tally.drafted, tally.accepted) == (2, 4, 3, 3)
    first = 2 * 2.0 + 2 * (2.0 + 0.5) + (2.0 + 2.0) * 1.1 + 0.5
    second = 3 * 2.0 + 2 * (2.0 + 0.5) + (2.0 + 2.0) * 1.2 + 0.5
    assert tally.ms == pytest.approx(first + second)


def test_lookup_drafts_what_the_prompt_says() -> None:
    prompt = (1, 2, 3, 4, 5, 6, 1, 2)
    flags, entropy = np.ones((5, 1), bool), np.zeros((5, 1), np.float32)
    text = Recorded(prompt, (3, 4, 5, 9, 8), flags, entropy)
    assert text.lookup_runs[0][1] == 3  # 3 4 5 as before, then 9 instead of 6
    tally = Replay(toy_costs())(Policy("exact", lookup=4), text)
    # After the prefill's 3: proposed 4 5 6 1, two right, then 9; for 8 there is nothing to look up.
    assert (tally.rounds, tally.tokens, tally.drafted, tally.accepted) == (2, 4, 4, 2)
    assert tally.ms == pytest.approx((4 + 2) * 1.4 + 0.5 + 6 + 0.5)


def test_budget_waits_for_at_most_the_buffer() -> None:
    text = _text([1, 1, 0, 1, 1, 1, 1], entropy=[0, 0, 0, 0, 0, 0, 9.0])
    tally = Replay(toy_costs())(Policy("budget", place=0, depth=2, tau=0.5), text)
    # Tokens 1-3 leave, 4 must run deep with three waiting, 5 leaves, 6 is unsure and runs deep with one waiting.
    assert (tally.tokens, tally.exited, tally.wrong) == (6, 4, 1)
    shallow = 2.0 + 2.0 + 0.5
    assert tally.ms == pytest.approx(6 * shallow + (2.0 * 1.3 + 2.0) + (2.0 * 1.1 + 2.0))


def test_expected_accepted_against_brute_force() -> None:
    generator = np.random.default_rng(0)
    texts = [_text(generator.integers(0, 4, 60).astype(bool).astype(int).tolist()) for _ in range(5)]
    for length in (1, 3, 7):
        accepted = []
        for text in texts:
            flags = text.agrees[:, 0].tolist()
            place = 1
            while place < len(flags):
                run = 0
                while run < length and place + run < len(flags) and flags[place + run]:
                    run += 1
                accepted.append(run)
                place += run + 1
        assert expected_accepted(texts, 0, length) == pytest.approx(np.mean(accepted))
    assert expected_accepted([_text([1])], 0, 3) is None


def test_endless_repetition_is_found() -> None:
    flags, entropy = np.ones((40, 1), bool), np.zeros((40, 1), np.float32)
    loop = Recorded((), tuple([7, 8, 9, 10] + [1, 2, 3] * 12), flags, entropy)
    fresh = Recorded((), tuple(range(40)), flags, entropy)
    assert looping_share([fresh]) == 0
    assert looping_share([loop]) == pytest.approx((36 - 8) / 40)  # from the end of the third time on
