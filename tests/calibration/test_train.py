"""Training that is interrupted, and what stops it."""

import math
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eexport.calibration.train import Course, Tensors, adamw, muon, train
from eexport.runtime.errors import EexportError

Optimizers = Callable[[Tensors], list[torch.optim.Optimizer]]

COURSE = Course(30, save_every=4)
DATA = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
WANTED = DATA @ torch.randn(6, 3, generator=torch.Generator().manual_seed(1)) + 1


def first() -> Tensors:
    generator = torch.Generator().manual_seed(2)
    return {"weight": torch.randn(3, 6, generator=generator), "bias": torch.zeros(3), "scale": torch.ones(3)}


def batches() -> Iterator[list[int]]:
    return cycle([[0, 3, 5], [1, 2, 9], [4, 6, 7], [8, 10, 15]])


def loss_of(values: Tensors, rows: list[int]) -> Tensor:
    said = torch.nn.functional.linear(DATA[rows], values["weight"], values["bias"]) * values["scale"]
    return (said - WANTED[rows]).pow(2).mean()


def run(
    state: Path,
    optimizers: Optimizers = adamw,
    loss: Callable[[Tensors, list[int]], Tensor] = loss_of,
    course: Course = COURSE,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    begin: Tensors | None = None,
) -> tuple[Tensors, list[float]]:
    return train("toy", begin or first(), optimizers, batches(), loss, course, state, progress)


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizers", [partial(adamw, rate=0.03), muon])
def test_it_learns(optimizers: Optimizers, tmp_path: Path) -> None:
    told, begin = list[tuple[str, int, int]](), first()
    values, losses = run(tmp_path / "a.pt", optimizers, course=Course(600), progress=lambda *at: told.append(at))
    assert told == [("training toy", step, 600) for step in range(1, 601)]
    assert len(losses) == 10 and losses[-1] < 0.2 * losses[0]
    assert equal(begin, first()) and not values["weight"].requires_grad


@pytest.mark.parametrize("optimizers", [adamw, muon])
@pytest.mark.parametrize("interrupted_at", [(1,), (4, 5), (7, 22, 23), (29, 30)])
def test_interrupted_and_gone_on_with_it_comes_out_the_same(
    optimizers: Optimizers, interrupted_at: tuple[int, ...], tmp_path: Path
) -> None:
    whole, losses = run(tmp_path / "whole.pt", optimizers)
    for count in interrupted_at:

        def stop(_: str, done: int, total: int, at: int = count) -> None:
            assert total == 30
            if done == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts.pt", optimizers, progress=stop)
        assert (tmp_path / "parts.pt").exists() == (max(interrupted_at[: interrupted_at.index(count) + 1]) > 4)
    values, again = run(tmp_path / "parts.pt", optimizers)
    assert equal(values, whole) and again == losses
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["parts.pt", "whole.pt"]


def test_what_is_finished_is_not_done_again(tmp_path: Path) -> None:
    def never(*_: object) -> Tensor:
        raise AssertionError

    whole, losses = run(tmp_path / "a.pt")
    values, again = run(tmp_path / "a.pt", loss=never)
    assert equal(values, whole) and again == losses


def test_losses_are_means_of_tenths(tmp_path: Path) -> None:
    numbers = iter(range(23))

    def counted(values: Tensors, _: list[int]) -> Tensor:
        return 0 * values["weight"].sum() + next(numbers)

    _, losses = run(tmp_path / "a.pt", loss=counted, course=Course(23))
    assert losses == [0.5 + 2 * tenth for tenth in range(11)] + [22.0]
    one = iter([7.0])
    assert run(tmp_path / "b.pt", loss=lambda v, _: v["bias"].sum() + next(one), course=Course(1))[1] == [7.0]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("optimizers", [adamw, muon])
def test_a_loss_that_is_no_number_stops_it(broken: float, optimizers: Optimizers, tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole.pt", optimizers)
    steps = 0

    def fails(values: Tensors, rows: list[int]) -> Tensor:
        nonlocal steps
        steps += 1
        return loss_of(values, rows) * (broken if steps == 19 else 1)

    state = tmp_path / "a.pt"
    with pytest.raises(EexportError, match=rf"^toy: the loss of step 19 is -?(nan|inf); [^\n]*{state}[^\n]*$"):
        run(state, optimizers, fails)
    kept = torch.load(state, weights_only=True)
    assert kept["step"] == 16 and all(value.isfinite().all() for value in kept["values"].values())
    values, _ = run(state, optimizers)
    assert equal(values, whole), "the last good state is as if nothing had happened"


@pytest.mark.parametrize("damage", ["empty", "truncated", "text", "other shapes", "other names", "other optimizers"])
def test_a_damaged_state_is_one_line(damage: str, tmp_path: Path) -> None:
    state = tmp_path / "a.pt"
    run(state, muon if damage == "other optimizers" else adamw)
    if damage == "empty":
        state.write_bytes(b"")
    elif damage == "truncated":
        state.write_bytes(state.read_bytes()[:-200])
    elif damage == "text":
        state.write_text("hello")
    elif damage.startswith("other "):
        kept = torch.load(state, weights_only=True)
        if damage == "other shapes":
            kept["values"]["weight"] = torch.zeros(2, 2)
        elif damage == "other names":
            kept["values"] = {"x": torch.zeros(2)}
        torch.save(kept, state)
    before = state.read_bytes()
    with pytest.raises(EexportError, match=rf"^{state}: cannot be gone on from \([^\n]+\): remove it [^\n]*$"):
        run(state)
    assert state.read_bytes() == before


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A limit on the size of files stands in for it."""
    state = tmp_path / "a.pt"
    with pytest.raises(KeyboardInterrupt):
        run(state, progress=lambda _, done, total: (_ for _ in ()).throw(KeyboardInterrupt) if done == 6 else None)
    before = state.read_bytes()
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, allowed[1]))
    try:
        with pytest.raises(EexportError, match=rf"^{state}: cannot be written \([^\n]+\)$"):
            run(state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert state.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert equal(run(state)[0], run(tmp_path / "whole.pt")[0])


def test_no_folder_for_the_state(tmp_path: Path) -> None:
    with pytest.raises(EexportError, match=r"^[^\n]*nowhere/a.pt: cannot be written \([^\n]+\)$"):
        run(tmp_path / "nowhere/a.pt")


class TestCourse:
    def test_rates_rise_and_fall(self) -> None:
        shares = [Course(1000).share_of_rate(step) for step in range(1000)]
        assert shares[0] == pytest.approx(0.02) and shares[24] == pytest.approx(0.5, abs=0.01)
        assert max(shares) == shares[49] and shares[49] > 0.99
        assert shares[49:] == sorted(shares[49:], reverse=True)
        assert shares[500] == pytest.approx(0.05 + 0.95 / 2) and shares[-1] == pytest.approx(0.05, abs=1e-3)

    def test_short_ones_warm_up_as_well(self) -> None:
        assert Course(20).share_of_rate(0) == pytest.approx(0.5)
        assert Course(1).share_of_rate(0) == 1.0

    @pytest.mark.parametrize("optimizers", [adamw, muon])
    def test_they_are_what_the_optimizers_use(self, optimizers: Optimizers, tmp_path: Path) -> None:
        made = list[torch.optim.Optimizer]()
        rates = list[list[float]]()

        def kept(values: Tensors) -> list[torch.optim.Optimizer]:
            made.extend(optimizers(values))
            return made

        def look(*_: object) -> None:
            rates.append([group["lr"] for optimizer in made for group in optimizer.param_groups])

        highest = [group["lr"] for optimizer in optimizers(first()) for group in optimizer.param_groups]
        run(tmp_path / "a.pt", kept, progress=look)
        for step, found in enumerate(rates):
            assert found == pytest.approx([rate * COURSE.share_of_rate(step) for rate in highest])


@pytest.mark.parametrize("optimizers", [adamw, muon])
def test_only_matrices_decay(optimizers: Optimizers, tmp_path: Path) -> None:
    begin = {"weight": torch.ones(3, 6), "bias": torch.ones(3)}
    values, _ = run(tmp_path / "a.pt", optimizers, lambda v, _: 0 * (v["weight"].sum() + v["bias"].sum()), begin=begin)
    assert (values["weight"] < 1).all() and torch.equal(values["bias"], torch.ones(3))
