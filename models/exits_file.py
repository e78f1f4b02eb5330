"""A calibration on disk: ``calibration.json`` says what there is, ``calibration.safetensors`` holds the numbers.

Matrices are int8 with one fp16 scale for each 32 weights along their input width, vectors fp16, or fp32 where that
would overflow. Bundles at int8 use the same grid, so building one from a calibration rounds nothing again.
"""

import hashlib
import json
import lzma
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from eexport.models.errors import CheckpointError
from eexport.models.exits import Calibration, ExitHead, ExitPredictor, Floats, Thresholds
from eexport.models.folders import FolderKind, check_target, whole_folder

FORMAT_VERSION = 2
JSON_NAME = "calibration.json"
TENSORS_NAME = "calibration.safetensors"

_KIND = FolderKind("calibration", JSON_NAME, CheckpointError)
_BLOCK = 32
_STEPS = 127
_SCALES = ".scales"

Stored = dict[str, NDArray[np.generic]]
T = TypeVar("T")


def write_calibration(calibration: Calibration, folder: Path, *, force: bool = False) -> None:
    """Write ``folder``, whole or not at all; with ``force`` it may replace an older calibration, and nothing else.

    Raises:
        CheckpointError: The folder is in use or cannot be written, or a number cannot be stored.
    """
    tensors: Stored = {"draft_ids": calibration.draft_ids.astype(np.int32)}
    for head in calibration.heads:
        tensors |= _packed(_owner(head.name), head.tensors)
    if calibration.predictor is not None:
        tensors |= _packed("predictor.", calibration.predictor.tensors)
    data: bytes = save(tensors)
    text = json.dumps(_described(calibration, data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with whole_folder(folder, _KIND, force=force, needed_bytes=len(data) + len(text)) as partial:
        (partial / TENSORS_NAME).write_bytes(data)
        (partial / JSON_NAME).write_text(text, encoding="utf-8")


def check_free(folder: Path, *, force: bool) -> None:
    """Raise CheckpointError where ``write_calibration`` would for what is there, before there is anything to write."""
    check_target(folder, _KIND, force)


def read_calibration(folder: Path) -> Calibration:
    """Read what ``write_calibration`` wrote; ``exits.check_fits`` says whether it fits a checkpoint.

    Raises:
        CheckpointError: There is none, or it is damaged or of another version.
    """
    path = folder / JSON_NAME
    if not path.is_file():
        what = "no such folder" if not folder.exists() else f"it has no {JSON_NAME}"
        raise CheckpointError(f"{folder}: is not a calibration ({what})")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["format_version"]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: has format version {version}, this eexport reads {FORMAT_VERSION}: calibrate again"
        )
    try:
        return _parse(raw, load(_checked_bytes(folder / TENSORS_NAME, raw["tensors"])))
    except (AttributeError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise _damaged(path, error) from None


def _owner(head: str) -> str:
    return f"heads.{head}."


def _described(calibration: Calibration, data: bytes) -> dict[str, Any]:
    """The content of calibration.json; no threshold for the previous token is null, as JSON has no infinity."""
    thresholds, predictor = calibration.thresholds, calibration.predictor
    rule = None if thresholds is None else asdict(thresholds)
    if rule is not None and rule["previous"] == np.inf:
        rule["previous"] = None
    return {
        "format_version": FORMAT_VERSION,
        "checkpoint": calibration.checkpoint,
        "identity": calibration.identity,
        "heads": [{"name": h.name, "depth": h.depth, "features": list(h.features)} for h in calibration.heads],
        "predictor": None if predictor is None else {"layers": list(predictor.layers)},
        "thresholds": rule,
        "record": calibration.record,
        "tensors": {"file": TENSORS_NAME, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
    }


def _checked_bytes(path: Path, info: dict[str, Any]) -> bytes:
    packed = path.with_name(f"{path.name}.xz")  # as those that come with this package are
    try:
        data = lzma.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()
    except lzma.LZMAError as error:
        raise CheckpointError(f"{packed}: is damaged ({error}): copy the whole calibration again") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}): copy the whole calibration again") from None
    if len(data) != info["bytes"] or hashlib.sha256(data).hexdigest() != info["sha256"]:
        raise CheckpointError(f"{path}: is not the file that {JSON_NAME} describes: copy the whole calibration again")
    return data


def _parse(raw: dict[str, Any], stored: Stored) -> Calibration:
    heads = []
    for entry in _typed(raw["heads"], list):
        name, features = _typed(entry["name"], str), tuple(_typed(f, str) for f in _typed(entry["features"], list))
        heads.append(ExitHead(name, _typed(entry["depth"], int), features, _unpacked(_owner(name), stored)))
    predictor = None
    if raw["predictor"] is not None:
        layers = tuple(_typed(layer, int) for layer in _typed(raw["predictor"]["layers"], list))
        predictor = ExitPredictor(layers, _unpacked("predictor.", stored))
    draft_ids = stored.pop("draft_ids")
    if draft_ids.ndim != 1 or draft_ids.dtype != np.int32:
        raise ValueError(f"draft_ids are {draft_ids.dtype} {draft_ids.shape}")
    if stored:
        raise ValueError(f"{TENSORS_NAME} holds {sorted(stored)[0]}, which belongs to nothing")
    return Calibration(
        checkpoint=_typed(raw["checkpoint"], str),
        identity=_typed(raw["identity"], str),
        heads=tuple(heads),
        draft_ids=draft_ids.astype(np.int32),
        predictor=predictor,
        thresholds=None if raw["thresholds"] is None else _thresholds(raw["thresholds"]),
        record=_typed(raw["record"], dict),
    )


def _thresholds(raw: dict[str, Any]) -> Thresholds:
    previous = raw["previous"]
    entropy = tuple(float(value) for value in _typed(raw["entropy"], list))
    return Thresholds(entropy, float("inf") if previous is None else float(previous), _typed(raw["numerics"], str))


def _typed(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    return CheckpointError(f"{path}: is damaged ({type(error).__name__}: {reason}): copy it or calibrate again")


def _packed(owner: str, tensors: Mapping[str, Floats]) -> Stored:
    """Tensors under their names in the file. Raises CheckpointError for numbers that cannot be stored."""
    stored: Stored = {}
    for name, values in tensors.items():
        largest = np.abs(values).max(initial=0)
        if not largest <= _STEPS * float(np.finfo(np.float16).max):  # NaN is not
            raise CheckpointError(f"{owner}{name} cannot be stored: its largest number is {largest}")
        if values.ndim == 2:
            stored[owner + name], stored[owner + name + _SCALES] = _quantized(values.astype(np.float32))
        else:
            fits = largest <= np.finfo(np.float16).max
            stored[owner + name] = values.astype(np.float16 if fits else np.float32)
    return stored


def _unpacked(owner: str, stored: Stored) -> dict[str, Floats]:
    """The fp32 tensors of ``owner``, taken out of ``stored``. Raises KeyError or ValueError when parts do not fit."""
    names = [name for name in stored if name.startswith(owner) and not name.endswith(_SCALES)]
    tensors: dict[str, Floats] = {}
    for name in names:
        values = stored.pop(name)
        if values.dtype == np.int8:
            values = _dequantized(values, stored.pop(name + _SCALES))
        tensors[name.removeprefix(owner)] = values.astype(np.float32)
    return tensors


def _quantized(weight: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Integers [N, K] and scales [N, ceil(K/32)] of a matrix [N, K]."""
    rows, width = weight.shape
    blocks = np.pad(weight, ((0, 0), (0, -width % _BLOCK))).reshape(rows, -1, _BLOCK)
    peaks = np.abs(blocks).max(-1) / np.float32(_STEPS)
    scales = peaks.astype(np.float16)
    # Rounded down, so that the largest weight is 127 steps, by which whoever quantises again finds the same grid.
    scales = np.where(scales > peaks, np.nextafter(scales, np.float16(0)), scales)
    scales[scales == 0] = 1
    values = np.rint(blocks / scales[..., None].astype(np.float32)).clip(-_STEPS, _STEPS).astype(np.int8)
    return np.ascontiguousarray(values.reshape(rows, -1)[:, :width]), scales


def _dequantized(values: NDArray[np.generic], scales: NDArray[np.generic]) -> Floats:
    rows, width = values.shape
    if scales.shape != (rows, -(-width // _BLOCK)):
        raise ValueError(f"scales {scales.shape} for integers {values.shape}")
    weight: Floats = values.astype(np.float32) * np.repeat(scales.astype(np.float32), _BLOCK, axis=1)[:, :width]
    return weight
