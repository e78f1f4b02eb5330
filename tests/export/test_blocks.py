"""Where a model is cut."""

import re

import pytest

from eexport.export.blocks import PlanError, plan_blocks


def ends(layers: int, blocks: str, exits: tuple[int, ...] = ()) -> list[int]:
    ranges = plan_blocks(layers, blocks, exits)
    assert ranges[0][0] == 0 and ranges[-1][1] == layers
    assert all(left[1] == right[0] for left, right in zip(ranges, ranges[1:], strict=False))
    assert all(start < end for start, end in ranges)
    return [end for _, end in ranges]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (30, [4, 8, 16, 30]),  # SmolLM2
        (24, [4, 8, 12, 24]),  # Qwen2.5-Coder
        (16, [4, 8, 16]),
        (8, [4, 8]),
        (5, [4, 5]),
        (4, [4]),
        (3, [3]),
        (2, [2]),
        (1, [1]),
    ],
)
def test_auto(layers: int, expected: list[int]) -> None:
    assert ends(layers, "auto") == expected


def test_auto_is_a_plan_for_every_depth() -> None:
    for layers in range(1, 130):
        found = ends(layers, "auto")
        assert len(found) <= 4
        assert layers <= 4 or found[0] == 4  # the predictor reads layers 1 to 4, which are then in one block


@pytest.mark.parametrize(
    ("layers", "blocks", "expected"),
    [
        (30, "1", [30]),
        (30, "2", [15, 30]),
        (30, "4", [8, 15, 22, 30]),
        (3, "3", [1, 2, 3]),
        (30, "4,8,16", [4, 8, 16, 30]),
        (30, "4,8,30", [4, 8, 30]),
        (30, " 4, 8", [4, 8, 30]),
        (2, "1,2", [1, 2]),
    ],
)
def test_as_asked(layers: int, blocks: str, expected: list[int]) -> None:
    assert ends(layers, blocks) == expected


@pytest.mark.parametrize(
    ("layers", "exits", "expected"),
    [
        (30, (8,), [4, 8, 16, 30]),
        (30, (4, 8), [4, 8, 16, 30]),
        (30, (10,), [4, 10, 16, 30]),
        (30, (6, 12), [4, 6, 12, 30]),
        (30, (6, 12, 20), [6, 12, 20, 30]),
        (30, (3, 6, 12, 20), [3, 6, 12, 20, 30]),
        (3, (1,), [1, 3]),
    ],
)
def test_auto_ends_blocks_at_trained_exits(layers: int, exits: tuple[int, ...], expected: list[int]) -> None:
    assert ends(layers, "auto", exits) == expected


def test_trained_exits_that_no_block_ends_at() -> None:
    assert ends(30, "4,8,16", (8, 16)) == [4, 8, 16, 30] == ends(30, "4,8,16", ())
    assert ends(30, "2", (15,)) == [15, 30]
    for blocks in ("2", "1", "4,8,20"):
        with pytest.raises(PlanError, match=f"--blocks {blocks}: .* after layer 16, where the calibration") as caught:
            plan_blocks(30, blocks, (16,))
        (mended,) = re.findall(r"give (\S+) or auto", str(caught.value))
        assert 16 in ends(30, mended, (16,))


def test_any_number_of_blocks() -> None:
    for count in range(1, 31):
        assert len(ends(30, str(count))) == count


@pytest.mark.parametrize(
    "blocks",
    ["0", "31", "-1", "", "many", "4,8,", "8,4", "4,4", "0,4", "4,31", "4;8", "1.5", "4,x", "²", "30,30"],
)
def test_refused(blocks: str) -> None:
    with pytest.raises(PlanError, match="--blocks") as caught:
        plan_blocks(30, blocks)
    assert "\n" not in str(caught.value)
