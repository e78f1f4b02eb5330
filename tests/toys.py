"""Round numbers for arithmetic that tests do by hand."""

from eexport.runtime.costs import CostTable, StageCost
from eexport.runtime.manifest import StageKind


def toy_costs(
    *, layers: int = 4, layer: float = 1.0, head: float = 2.0, host: float = 0.5, row: float = 0.1, rows: int = 8
) -> CostTable:
    """Two blocks and a free embedding; times in ms for a row, of which each further row costs the share ``row``."""
    counts = tuple(range(1, rows + 1))

    def stage(name: str, kind: StageKind, first: int, end: int, ms: float) -> StageCost:
        return StageCost(name, kind, (first, end), tuple(ms * (1 + row * (m - 1)) for m in counts))

    half = layers // 2
    stages = (
        stage("embed", "embed", 0, 0, 0.0),
        stage("block.0", "block", 0, half, layer * half),
        stage("block.1", "block", half, layers, layer * (layers - half)),
        stage("head", "head", layers, layers, head),
    )
    return CostTable("toy", layers, "int8", "ort", "cpu", "toy", 1, 0, counts, stages, host)
