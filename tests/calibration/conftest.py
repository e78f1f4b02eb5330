"""A tiny model, and texts that it wrote."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from eexport.calibration.corpus import Corpus
from eexport.calibration.generate import Job, Lengths, generate
from eexport.calibration.slots import Slots
from eexport.models.checkpoint import Checkpoint, open_checkpoint
from eexport.runtime.backend_ort import OrtBackend
from eexport.runtime.manifest import read_manifest

LAYERS, LENGTHS = 6, Lengths(10, 8)
KINDS = ("code", "json", "math", "text")

WriteTexts = Callable[..., Corpus]


@pytest.fixture(scope="session")
def six_layers(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint with room for exits after layers 2 and 4."""
    return tiny_checkpoint(layers=LAYERS)


@pytest.fixture(scope="session")
def opened(six_layers: Path) -> Checkpoint:
    """It, opened."""
    return open_checkpoint(six_layers)


@pytest.fixture(scope="session")
def two_exits(six_layers: Path, tiny_bundle: Callable[..., Path]) -> Path:
    """It as a bundle whose blocks end after layers 2 and 4."""
    return tiny_bundle(six_layers, blocks="2,4")


@pytest.fixture(scope="session")
def write_texts(backend: OrtBackend) -> WriteTexts:
    """Have a bundle write the texts of jobs into a folder."""

    def write(
        bundle: Path,
        folder: Path,
        jobs: Sequence[Job],
        lengths: Lengths = LENGTHS,
        slots: int = 4,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> Corpus:
        corpus = Corpus(folder, {})
        capacity = max(len(job.ids) + len(job.closing) + lengths.message + lengths.answer for job in jobs)
        generate(Slots(bundle, read_manifest(bundle), backend, slots, capacity), jobs, corpus, lengths, progress)
        return corpus

    return write


@pytest.fixture(scope="session")
def corpus(two_exits: Path, write_texts: WriteTexts, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Sixty texts of all kinds and splits that the model wrote; not to be changed."""
    random = np.random.default_rng(0)
    jobs = [
        Job(KINDS[i % 4], "made", (1, *random.integers(3, 300, random.integers(2, 16)).tolist()), first=1)
        for i in range(60)
    ]
    return write_texts(two_exits, tmp_path_factory.mktemp("corpus") / "texts", jobs)
