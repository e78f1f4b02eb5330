"""What the report warns of."""

import numpy as np
import pytest
from toys import toy_costs

from eexport.calibration.analysis import Sample, Subject, analyse
from eexport.calibration.data import Encoded, Prompt, Task
from eexport.calibration.decode import FULL, Continuation, Written
from eexport.calibration.measures import Measures

END = 9


def _sample(number: int, *, task: Task | None, correct: bool | None, ended: bool = True, loop: bool = False) -> Sample:
    """Forty tokens, of which only the last of two depths says what comes."""
    tokens = [1, 2] * 20 if loop else list(range(100 + number, 140 + number))
    tokens[-1] = END if ended else 8
    argmax = np.stack([np.zeros(40, np.int32), np.array(tokens, np.int32)], axis=1)
    half = np.tile(np.array([0.5, 1.0], np.float32), (40, 1))
    measures = Measures(half, half, (10 * half).astype(np.uint8), (10 * half).astype(np.uint8), argmax, half, 1 - half)
    written = Written(tokens, [1] * 40, [0.0] * 40, [0.1] * 40)
    prompt = Prompt("text", "", task, "1", None, None, "", f"made:{number}")
    paths = {FULL: written, 0: written}
    return Sample(Encoded(prompt, (5, number), False), Continuation(measures, paths), dict.fromkeys(paths, correct))


def _caveats(samples: list[Sample], depths: tuple[int, ...] = (1, 2)) -> str:
    subject = Subject(2, depths, frozenset({END}), (0.9,), 0.5, 0.5)
    return "\n".join(analyse(samples, subject, toy_costs(layers=2), str)["caveats"])


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([_sample(0, task=None, correct=None)], "all prompts are one"),
        ([_sample(n, task=None, correct=None) for n in range(4)], "text: too few prompts"),
        (
            [_sample(n, task="exact_match", correct=True) for n in range(40)],
            "one changed answer is 2.5 points; confirming a loss within 0.5pp takes 765",
        ),
        ([_sample(n, task="exact_match", correct=n == 0) for n in range(40)], "solves so few"),
        ([_sample(n, task="exact_match", correct=n == 0) for n in range(40)], "within 5%rel"),
        (
            [_sample(n, task="exact_match", correct=True, ended=n > 20) for n in range(40)],
            "52% of the answers were cut",
        ),
        ([_sample(n, task="pass_at_1", correct=None) for n in range(8)], "--run-code"),
        ([_sample(n, task=None, correct=None, loop=True) for n in range(8)], "endless repetition"),
    ],
)
def test_what_is_warned_of(samples: list[Sample], expected: str) -> None:
    assert expected in _caveats(samples)


def test_nothing_is_warned_of_where_nothing_is_wrong() -> None:
    assert _caveats([_sample(n, task=None, correct=None) for n in range(8)]) == ""
