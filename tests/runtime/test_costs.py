"""The cost table: what is measured, what is worked out from it, and files that are none."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_checkpoint

from eexport.runtime.backend import Buffer
from eexport.runtime.backend_fake import FakeBackend, FakeStage
from eexport.runtime.bench import TEXT
from eexport.runtime.costs import CostTable, StageCost, measure_costs
from eexport.runtime.engine import Engine
from eexport.runtime.errors import ContextError, EexportError
from eexport.runtime.manifest import StageSpec

Make = Callable[..., Path]
Load = Callable[..., Engine]

TABLE = CostTable(
    model="tiny",
    num_layers=5,
    precision="int8",
    dialect="ort",
    device="cpu",
    backend="onnxruntime",
    threads=2,
    past=256,
    rows=(1, 2, 3),
    stages=(
        StageCost("embed", "embed", (0, 0), (0.25, 0.25, 0.5)),
        StageCost("block_00", "block", (0, 2), (2.0, 3.0, 5.0)),
        StageCost("block_01", "block", (2, 5), (3.0, 6.0, 5.0)),
        StageCost("head", "head", (5, 5), (1.0, 2.0, 2.5)),
    ),
    host_ms=0.5,
)


class TestTable:
    def test_parts(self) -> None:
        assert [TABLE.embed_ms(rows) for rows in range(4)] == [0, 0.25, 0.25, 0.5]
        assert [TABLE.head_ms(rows) for rows in range(4)] == [0, 1, 2, 2.5]
        assert TABLE.step_ms(1) == 0.25 + 2 + 3 + 1 + 0.5
        assert TABLE.step_ms(2) == 0.25 + 3 + 6 + 2 + 0.5
        assert TABLE.step_ms(0) == 0

    @pytest.mark.parametrize(
        ("first", "end", "expected"),
        [(0, 5, 9), (0, 2, 3), (2, 5, 6), (0, 1, 1.5), (3, 4, 2), (1, 4, 1.5 + 4), (2, 2, 0), (5, 5, 0)],
    )
    def test_any_range_of_layers(self, first: int, end: int, expected: float) -> None:
        assert TABLE.layers_ms(first, end, 2) == pytest.approx(expected)
        assert TABLE.layers_ms(first, end, 0) == 0

    @pytest.mark.parametrize(("first", "end"), [(-1, 2), (3, 2), (0, 6)])
    def test_layers_that_are_not_there(self, first: int, end: int) -> None:
        with pytest.raises(ValueError, match="of 5"):
            TABLE.layers_ms(first, end, 1)

    def test_more_rows_than_measured(self) -> None:
        assert TABLE.head_ms(7) == 2.5 + 4 * 0.5
        assert TABLE.layers_ms(0, 2, 4) == 7
        assert TABLE.layers_ms(2, 5, 9) == 5, "more rows never cost less, whatever noise says"
        lone = StageCost("head", "head", (5, 5), (2.0,))
        assert [lone.at(rows) for rows in (0, 1, 4)] == [0, 2, 8]
        with pytest.raises(ValueError, match="-1 rows"):
            lone.at(-1)


class TestFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "costs.json"
        path.write_text("an older one")
        TABLE.write(path)
        assert CostTable.read(path) == TABLE
        assert path.read_text(encoding="utf-8") == TABLE.to_json()
        assert list(tmp_path.iterdir()) == [path]

    def test_a_write_that_fails_leaves_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "costs.json"
        TABLE.write(path)

        def full(self: Path, content: bytes) -> int:
            self.write_text(content[:9].decode())
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(EexportError, match="costs.json: .*No space left"):
            dataclasses.replace(TABLE, past=3).write(path)
        assert CostTable.read(path) == TABLE and list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("place", ["file/costs.json", "."])
    def test_places_that_cannot_be(self, tmp_path: Path, place: str) -> None:
        (tmp_path / "file").touch()
        for use in (TABLE.write, CostTable.read):
            with pytest.raises(EexportError) as caught:
                use(tmp_path / place)
            assert str(tmp_path / place) in str(caught.value)

    @pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"rows": 1e999}'])
    def test_not_a_table(self, tmp_path: Path, content: bytes) -> None:
        assert refusal(tmp_path, content)

    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CostTable)])
    @pytest.mark.parametrize("value", [None, True, "missing", {}, [None], -1])
    def test_every_field_is_checked(self, tmp_path: Path, field: str, value: Any) -> None:
        raw = json.loads(TABLE.to_json())
        if value == "missing":
            del raw[field]
        else:
            raw[field] = value
        assert field in refusal(tmp_path, json.dumps(raw).encode())

    @pytest.mark.parametrize(
        ("edit", "named"),
        [
            (lambda raw: raw.update(host_ms=float("nan")), "host_ms"),
            (lambda raw: raw.update(host_ms=float("inf")), "host_ms"),
            (lambda raw: raw.update(host_ms=10**400), "host_ms"),
            (lambda raw: raw.update(rows=[1, 2, 4]), "rows"),
            (lambda raw: raw.update(rows=[]), "rows"),
            (lambda raw: raw.update(rows=[1, 2]), "stages[0].ms"),
            (lambda raw: raw.update(num_layers=6), "layers"),
            (lambda raw: raw.update(threads=0), "threads"),
            (lambda raw: raw["stages"].pop(), "stages"),
            (lambda raw: raw["stages"].pop(1), "layers of block_01"),
            (lambda raw: raw["stages"][3].update(kind="block"), "stages"),
            (lambda raw: raw["stages"][1].pop("name"), "stages[1].name"),
            (lambda raw: raw["stages"][1].update(layers=[0, 3]), "layers of block_01"),
            (lambda raw: raw["stages"][2].update(layers=[2, 2]), "layers of block_01"),
            (lambda raw: raw["stages"][2].update(layers=[2.0, 5]), "stages[2].layers"),
            (lambda raw: raw["stages"][2].update(layers=[2]), "stages[2].layers"),
            (lambda raw: raw["stages"][2].update(ms=[1, -0.5, 1]), "stages[2].ms"),
            (lambda raw: raw["stages"][2].update(ms=[1, float("nan"), 1]), "stages[2].ms"),
            (lambda raw: raw["stages"][2].update(ms=[1, "2", 1]), "stages[2].ms"),
            (lambda raw: raw["stages"][2].update(ms=[1, 2, 3, 4]), "stages[2].ms"),
        ],
    )
    def test_what_makes_no_sense_is_named(
        self, tmp_path: Path, edit: Callable[[dict[str, Any]], object], named: str
    ) -> None:
        raw = json.loads(TABLE.to_json())
        edit(raw)
        assert named in refusal(tmp_path, json.dumps(raw).encode())


def refusal(folder: Path, content: bytes) -> str:
    path = folder / "costs.json"
    path.write_bytes(content)
    with pytest.raises(EexportError) as caught:
        CostTable.read(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slow = 1.0

    def __call__(self) -> float:
        return self.seconds

    def work(self, milliseconds: float) -> None:
        self.seconds += self.slow * milliseconds / 1000


def stage_ms(spec: StageSpec, rows: int) -> float:
    """A device of which every stage and row count has a cost of its own."""
    first, end = spec.layers
    return {"embed": 0.5, "block": 1.0 + first + (end - first) * rows, "head": 3.0 + 0.25 * rows**2}[spec.kind]


class TimedBackend(FakeBackend):
    """A fake whose stages take as long as `stage_ms` says."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda token: (token + 1) % 320)
        self._clock = clock

    def load(self, graph: Path, stage: StageSpec) -> FakeStage:
        loaded, clock = super().load(graph, stage), self._clock

        class TimedStage(FakeStage):
            def bind(self, buffers: Mapping[str, Buffer]) -> Callable[[], None]:
                run, rows = loaded.bind(buffers), buffers[stage.inputs[0].name].shape[1]

                def timed() -> None:
                    run()
                    clock.work(stage_ms(stage, rows))

                return timed

        return TimedStage(stage, self._next_token)


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Make, tiny_bundle: Make) -> Path:
    return tiny_bundle(tiny_checkpoint(soft=True, layers=4, context=200), precision="int8", blocks="2")


class TestMeasuring:
    def test_every_stage_gets_its_own_time(self, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        monkeypatch.setattr("time.perf_counter", clock)
        engine = Engine.load(bundle, backend=TimedBackend(clock))
        push = engine.codec.stream().__class__.push

        def slow_text(self: Any, token: int) -> str:
            clock.work(0.75)
            return push(self, token)

        monkeypatch.setattr(engine.codec.stream().__class__, "push", slow_text)

        def progress(what: str, done: int, total: int) -> None:
            clock.slow = 9.0 if what == "warming up" or done % 4 == 0 else 1.0

        table = measure_costs(engine, past=50, progress=progress)
        assert (table.rows, table.past, table.threads) == (tuple(range(1, 9)), 50, 1)
        assert engine.manifest.rows.multiple == 1
        for cost, spec in zip(table.stages, engine.manifest.stages, strict=True):
            assert (cost.name, cost.kind, cost.layers) == (spec.name, spec.kind, spec.layers)
            assert cost.ms == pytest.approx([stage_ms(spec, rows) for rows in range(1, 9)])
        assert table.host_ms == pytest.approx(0.75)

    def test_of_a_bundle(self, bundle: Path, tiny_engine: Load, tmp_path: Path) -> None:
        engine = tiny_engine(bundle)
        expected = list(engine.generate("hello", max_tokens=10, logprobs=2))
        seen: list[tuple[str, int, int]] = []
        table = measure_costs(engine, range(1, 4), past=20, repeats=3, progress=lambda *args: seen.append(args))
        assert all(ms > 0 for stage in table.stages for ms in stage.ms) and table.host_ms >= 0
        assert (table.model, table.num_layers, table.precision) == (engine.manifest.model.name, 4, "int8")
        assert (table.device, table.backend, table.dialect) == ("cpu", "onnxruntime", "ort")
        assert {(len(stage.ms), table.rows) for stage in table.stages} == {(3, (1, 2, 3))}
        assert [done for _, done, _ in seen] == list(range(seen[0][2])) and seen[-1][0] == "measuring"
        table.write(tmp_path / "costs.json")
        assert CostTable.read(tmp_path / "costs.json") == table
        assert list(engine.generate("hello", max_tokens=10, logprobs=2)) == expected
        measure_costs(engine, [1], past=20, repeats=1)
        list(engine.generate(engine.codec.encode(TEXT)[:20], max_tokens=1))
        assert engine.stats().reused_tokens == 0, "it left its own text in the cache"

    def test_the_context_limits_what_is_in_the_cache(self, tmp_path: Path, tiny_bundle: Make) -> None:
        folder = tiny_bundle(make_checkpoint(tmp_path / "short", layers=1, context=40))
        engine = Engine.load(folder, backend=FakeBackend(lambda token: token))
        table = measure_costs(engine, past=1000)
        assert 0 < table.past < 40
        assert len(list(engine.generate([5] * 39))) == 1
        short = Engine.load(folder, context=20, backend=FakeBackend(lambda token: token))
        with pytest.raises(ContextError, match="the context is 20"):
            measure_costs(short)

    @pytest.mark.parametrize(("rows", "repeats"), [([], 5), ([2], 5), ([1, 3], 5), ([1, 2], 0)])
    def test_wrong_arguments(self, bundle: Path, rows: list[int], repeats: int) -> None:
        engine = Engine.load(bundle, backend=FakeBackend(lambda token: token))
        with pytest.raises(ValueError, match="1 to n"):
            measure_costs(engine, rows, repeats=repeats)


class TestTimeStages:
    @pytest.mark.parametrize("dialect", ["ort", "standard"])
    def test_a_request_goes_on_as_if_nothing_was(
        self, tiny_checkpoint: Make, tiny_bundle: Make, tiny_engine: Load, dialect: str
    ) -> None:
        checkpoint = tiny_checkpoint(soft=True, layers=4, context=300)
        engine = tiny_engine(tiny_bundle(checkpoint, precision="int4", blocks="2", dialect=dialect))
        prompt = np.random.default_rng(1).integers(3, 300, 250).tolist()  # the cache grows on the way
        request: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logprobs": 3}
        expected = list(engine.generate(prompt, **request))
        tokens = []
        for index, token in enumerate(engine.generate(prompt, reuse_cache=False, **request)):
            tokens.append(token)
            seconds = engine.time_stages(prompt[: 1 + index % 9])
            assert len(seconds) == len(engine.manifest.stages) and min(seconds) > 0
        assert tokens == expected

    def test_what_does_not_fit_ends_the_request(self, bundle: Path, tiny_engine: Load) -> None:
        engine = tiny_engine(bundle)
        request = engine.generate([5, 6, 7], max_tokens=10, ignore_eos=True)
        next(request)
        with pytest.raises(ContextError):
            engine.time_stages([5] * 198)
        with pytest.raises(EexportError, match="ended"):
            next(request)
        assert len(list(engine.generate([5, 6, 7], max_tokens=10, ignore_eos=True))) == 10
