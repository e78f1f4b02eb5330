"""The bundle's manifest: what stages there are, what goes in and out of each, and what every file must hash to.

The exporter fills these dataclasses and the runtime executes from them; neither side knows a tensor name, shape or
dtype that is not written here. Dimension names in shapes: B batch (KV slots), T rows, C KV capacity.
"""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

from eexport.runtime.errors import BundleError
from eexport.runtime.exits import ExitRule

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"

StageKind = Literal["embed", "block", "head", "exit", "predictor"]

_SOURCES = ("token_ids", "hidden", "previous", "embedding")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One input or output of a stage; a dimension is a size or one of the names B, T, C."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def sized(self, **sizes: int) -> tuple[int, ...]:
        """The shape with its named dimensions filled in, e.g. ``sized(B=1, T=1, C=128)``."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """One graph. ``layers`` is the half-open range of a block; elsewhere it is (n, n), n layers have run before."""

    kind: StageKind
    name: str
    graph: str
    layers: tuple[int, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def sources(self) -> tuple[TensorSpec, ...]:
        """What it takes from other stages: token ids or hidden states, not positions and caches."""
        return tuple(t for t in self.inputs if t.name in _SOURCES or t.name.startswith("hidden."))

    @property
    def hidden_outputs(self) -> tuple[TensorSpec, ...]:
        """A block's hidden states: its own output first, then those of ``hidden_layers``."""
        return (self.outputs[0], *(t for t in self.outputs if t.name.startswith("hidden.")))

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Depths (1 = after the first layer) whose hidden state this block gives out besides its last."""
        return tuple(int(t.name.removeprefix("hidden.")) for t in self.outputs if t.name.startswith("hidden."))

    @property
    def kv_inputs(self) -> tuple[TensorSpec, ...]:
        """The key and value caches, layer by layer; the output of the same cache is ``present`` for ``past``."""
        return tuple(t for t in self.inputs if t.name.startswith("past."))


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What the runtime must know of the model itself."""

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_type: str
    rope_inv_freq: tuple[float, ...]
    rope_attention_factor: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PrecisionInfo:
    """Numeric form of the weights and of what flows between stages; recorded because it decides the tokens."""

    weights: str
    vocab_weights: str
    activations: str
    block_size: int | None
    matmul_activations: str


@dataclasses.dataclass(frozen=True)
class KVInfo:
    """Layout of the key/value caches and how deeper layers get those of a token that left early."""

    dtype: str
    layout: str
    fill: Literal["verify", "recompute", "propagate"]


@dataclasses.dataclass(frozen=True)
class RowsInfo:
    """How rows must be run for a row's bits not to depend on how many run with it.

    Kernels may treat a lone row otherwise than the same row among others. ``multiple``: rows come in multiples of this,
    padded by the caller. ``spare``: blocks pad their own attention by this many rows at the end, and lengths that are
    passed to them count these rows; the keys they leave lie beyond the valid ones and are written over.
    ``exact``: whether a row keeps its bits at all; if not, prefill, decode and verification may differ a little.
    """

    multiple: int
    spare: int
    exact: bool

    @property
    def overrun(self) -> int:
        """Cache rows that a step may touch beyond those asked for."""
        return self.multiple - 1 + self.spare


@dataclasses.dataclass(frozen=True)
class ExitsInfo:
    """The trained exits. The names of a stage's ``sources`` say which hidden states it reads.

    Attributes:
        heads: Exit heads by depth (``layers``); one at the full depth only drafts.
        predictor: From hidden states of the first layers to logits over the exits, shallowest first, and full depth.
        draft_ids: File (.npy, int32 [Vd], rising) of the token ids that the heads' logits stand for.
        rule: When a token may leave early without being verified; None if no thresholds were chosen, or on stages of
            other ``numerics``.
        record: What calibration says of its data, metrics and assumptions; not read by the engine.
    """

    heads: tuple[StageSpec, ...]
    predictor: StageSpec | None
    draft_ids: str
    rule: ExitRule | None
    record: dict[str, Any]

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The heads, and the predictor if there is one."""
        return self.heads if self.predictor is None else (*self.heads, self.predictor)


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """Tokenizer side files and the strings a chat template may refer to."""

    tokenizer: str
    chat_template: str | None
    special: dict[str, str]


@dataclasses.dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 of one file of the bundle."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything in manifest.json.

    ``stages`` is the chain; ``exits`` branch off from it, None in a bundle without trained ones. ``parity`` and
    ``built_with`` are records for people and not read by the engine.
    """

    dialect: Literal["ort", "standard"]
    model: ModelInfo
    precision: PrecisionInfo
    kv: KVInfo
    rows: RowsInfo
    stages: tuple[StageSpec, ...]
    exits: ExitsInfo | None
    text: TextInfo
    sampling: dict[str, float]
    parity: dict[str, Any]
    built_with: dict[str, Any]
    files: dict[str, FileInfo]
    schema_version: int = SCHEMA_VERSION

    @property
    def numerics(self) -> str:
        """What the stages' numbers depend on beside the checkpoint, in words: thresholds hold for these alone."""
        weights = self.precision
        block = "" if weights.block_size is None else f" in blocks of {weights.block_size}"
        return f"{self.dialect}, {weights.weights} and {weights.vocab_weights} for the vocabulary{block}"

    @property
    def blocks(self) -> tuple[StageSpec, ...]:
        """The layer blocks in order."""
        return tuple(s for s in self.stages if s.kind == "block")

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Candidate exits: depths at which a block ends, the full depth left out."""
        return tuple(b.layers[1] for b in self.blocks[:-1])

    @property
    def all_stages(self) -> tuple[StageSpec, ...]:
        """The chain, and what branches off from it."""
        return self.stages if self.exits is None else (*self.stages, *self.exits.stages)

    @property
    def exit_heads(self) -> tuple[StageSpec, ...]:
        """The heads at which a token may leave, shallowest first: those short of the full depth."""
        heads = () if self.exits is None else self.exits.heads
        return tuple(head for head in heads if head.layers[0] < self.model.num_layers)

    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token of context takes over all layers, those of exit heads included."""
        per_layer = 2 * self.model.num_kv_heads * self.model.head_dim
        layers = self.model.num_layers + (0 if self.exits is None else len(self.exits.heads))
        return layers * per_layer * (2 if self.kv.dtype == "float16" else 4)

    def to_json(self) -> str:
        """The text of manifest.json; a rule without a threshold for the previous token has null there."""
        raw = dataclasses.asdict(self)
        rule = raw["exits"] and raw["exits"]["rule"]
        if rule and rule["previous"] == math.inf:
            rule["previous"] = None
        return json.dumps(raw, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_manifest(bundle: Path) -> Manifest:
    """Parse ``bundle/manifest.json``. Raises BundleError for anything that is not a bundle of this schema."""
    path = bundle / MANIFEST_NAME
    if not path.is_file():
        what = "no such folder" if not bundle.exists() else f"it has no {MANIFEST_NAME}"
        raise BundleError(f"{bundle} is not an eexport bundle ({what}): make one with `eexport build`")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path} is damaged ({error}): build the bundle again") from None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema version {version}, this eexport reads {SCHEMA_VERSION}: "
            "build the bundle again with this version"
        )
    try:
        return _parse(raw)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BundleError(f"{path} is damaged ({type(error).__name__}: {error}): build the bundle again") from None


def check_files(bundle: Path, manifest: Manifest) -> None:
    """Compare size and SHA-256 of every file with the manifest. Raises BundleError naming the first that differs."""
    for name, info in manifest.files.items():
        path = bundle / name
        if not path.is_file():
            raise BundleError(f"{path} is missing: copy the whole bundle again or rebuild it")
        size = path.stat().st_size
        if size != info.bytes:
            raise BundleError(f"{path} has {size} bytes, the manifest says {info.bytes}: copy or build it again")
        digest = sha256(path)
        if digest != info.sha256:
            raise BundleError(
                f"{path} has sha256 {digest[:12]}…, the manifest says {info.sha256[:12]}…: copy or build it again"
            )


def sha256(path: Path) -> str:
    """SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _tensors(rows: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(r["name"], r["dtype"], tuple(r["shape"])) for r in rows)


def _stage(raw: dict[str, Any]) -> StageSpec:
    layers = (raw["layers"][0], raw["layers"][1])
    return StageSpec(raw["kind"], raw["name"], raw["graph"], layers, _tensors(raw["inputs"]), _tensors(raw["outputs"]))


def _exits(raw: dict[str, Any]) -> ExitsInfo:
    rule = raw["rule"]
    if rule is not None:
        previous = math.inf if rule["previous"] is None else float(rule["previous"])
        rule = ExitRule(tuple(float(value) for value in rule["entropy"]), previous)
    predictor = None if raw["predictor"] is None else _stage(raw["predictor"])
    return ExitsInfo(
        heads=tuple(_stage(s) for s in raw["heads"]),
        predictor=predictor,
        draft_ids=raw["draft_ids"],
        rule=rule,
        record=raw["record"],
    )


def _parse(raw: dict[str, Any]) -> Manifest:
    model = dict(raw["model"])
    for key in ("rope_inv_freq", "eos_token_ids"):
        model[key] = tuple(model[key])
    stages = tuple(_stage(s) for s in raw["stages"])
    if [s.kind for s in stages] != ["embed", *["block"] * (len(stages) - 2), "head"]:
        raise ValueError("stages must be one embed, the blocks and one head")
    for name in raw["files"]:
        if Path(name).name != name:
            raise ValueError(f"file name {name!r} leaves the bundle")
    text, exits = TextInfo(**raw["text"]), None if raw["exits"] is None else _exits(raw["exits"])
    used_files = [*(stage.graph for stage in stages), text.tokenizer, text.chat_template]
    if exits is not None:
        used_files += [*(stage.graph for stage in exits.stages), exits.draft_ids]
    for used in used_files:
        if used is not None and used not in raw["files"]:  # so that nothing is read that was not hashed
            raise ValueError(f"{used!r} is not among the files")
    manifest = Manifest(
        dialect=raw["dialect"],
        model=ModelInfo(**model),
        precision=PrecisionInfo(**raw["precision"]),
        kv=KVInfo(**raw["kv"]),
        rows=RowsInfo(**raw["rows"]),
        stages=stages,
        exits=exits,
        text=text,
        sampling=raw["sampling"],
        parity=raw["parity"],
        built_with=raw["built_with"],
        files={name: FileInfo(**info) for name, info in raw["files"].items()},
    )
    _check_exits(manifest)
    return manifest


def _check_exits(manifest: Manifest) -> None:
    """Raise ValueError where exits and the chain do not belong together."""
    if manifest.exits is None:
        return
    exits, count = manifest.exits, len(manifest.exit_heads)
    depths = [head.layers[0] for head in exits.heads]
    if depths != sorted(set(depths)) or not {*manifest.boundaries, manifest.model.num_layers}.issuperset(depths):
        raise ValueError(f"exit heads at depths {depths}, where no block ends")
    if exits.rule is not None and len(exits.rule.entropy) != count:
        raise ValueError(f"{len(exits.rule.entropy)} thresholds for {count} exits")
    if exits.predictor is not None and exits.predictor.outputs[0].shape[-1] != count + 1:
        raise ValueError(f"a predictor that does not choose among {count} exits")
