"""From checkpoint to bundle: one pass over the layers, each written, run and compared before the next is read."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from eexport.export.blocks import plan_blocks, plan_exits, plan_stages
from eexport.export.bundle import bundle_folder, file_infos
from eexport.export.dialect import Dialect, DialectName, Precision
from eexport.export.dialect_ort import OrtDialect
from eexport.export.dialect_standard import StandardDialect
from eexport.export.exit_stages import write_exits
from eexport.export.graph import WeightFile
from eexport.export.quantize import BLOCK_SIZES, block_for
from eexport.export.stages import LayerGraph, embed_graph, head_graph
from eexport.models.checkpoint import Checkpoint
from eexport.models.decoder import DecoderLayer, LayerKV, rms_norm, rope_tables
from eexport.models.exits import Calibration, check_fits
from eexport.models.exits_file import read_calibration
from eexport.models.spec import ModelSpec
from eexport.runtime.backend import Array
from eexport.runtime.backend_ort import OrtBackend
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import (
    MANIFEST_NAME,
    ExitsInfo,
    KVInfo,
    Manifest,
    ModelInfo,
    PrecisionInfo,
    StageSpec,
    TextInfo,
)
from eexport.runtime.text import TextCodec
from eexport.runtime.verify import Parity, Reference, StageRunner, Top, compare, compare_logits, failure, stage_parity

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8", "int4")
DIALECTS: tuple[DialectName, ...] = ("ort", "standard")

# On average the rows of a stage fed with the reference's input must come this close. A wrong graph is far below.
_LEAST_COSINE = {"fp32": 0.99999, "fp16": 0.999, "int8": 0.99, "int4": 0.9}
_BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1.125, "int4": 0.65}

_PROBE_TEXT = (
    "The harbour was quiet before dawn. Three boats had come in with 1,240 kg of herring, and the crews were asleep.\n"
    'def total(items: list[dict]) -> float:\n    return sum(item["price"] * item["count"] for item in items)\n'
    '{"name": "Ærø", "boats": [1, 2, 3], "open": true}\n'
)
_PROBE_ROWS = 64


class BuildError(EexportError):
    """The options do not fit the model, or the result is not what the reference computes."""


@dataclass(frozen=True)
class BuildOptions:
    """What to build.

    ``blocks`` is described at ``blocks.plan_blocks``, ``exact`` at ``manifest.RowsInfo``; ``calibration`` is a folder
    of trained exits to build in.
    """

    precision: Precision = "int8"
    dialect: DialectName = "ort"
    blocks: str = "auto"
    vocab_precision: Precision | None = None
    block_size: int = 32
    exact: bool = True
    calibration: Path | None = None
    force: bool = False


def build(
    checkpoint: Checkpoint,
    out: Path,
    options: BuildOptions,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Manifest:
    """Write the bundle of ``checkpoint`` to ``out``; ``progress(what, done, total)`` is called after each step.

    Raises:
        BuildError: Options that do not fit, or parity that fails; nothing is left behind.
        BundleError: ``out`` cannot be written.
        CheckpointError: The calibration is damaged or of another checkpoint.
    """
    spec = checkpoint.spec
    dialect = check_options(checkpoint, options)
    plan = _plan(checkpoint, dialect, options)
    needed = _estimated_bytes(spec, options, dialect, plan.calibration)
    with bundle_folder(out, force=options.force, needed_bytes=needed) as folder:
        run = _Build(checkpoint, dialect, options, plan, folder, progress)
        manifest = run.write()
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def check_options(checkpoint: Checkpoint, options: BuildOptions) -> Dialect:
    """The dialect that they ask for. Raises BuildError where they do not fit each other or the checkpoint."""
    dialect = _dialect(options)
    _check_divisible(checkpoint.spec, dialect, options)
    plan_blocks(checkpoint.spec.num_layers, options.blocks)
    return dialect


@dataclass(frozen=True)
class _Plan:
    """The stages of a bundle; with a calibration, those that branch off as well."""

    stages: tuple[StageSpec, ...]
    calibration: Calibration | None = None
    exits: ExitsInfo | None = None

    @property
    def exit_stages(self) -> tuple[StageSpec, ...]:
        return () if self.exits is None else self.exits.stages

    @property
    def depths_read(self) -> set[int]:
        """Depths whose hidden state some stage reads or is checked by."""
        early = {s.name for stage in self.exit_stages for s in stage.sources if s.name.startswith("hidden.")}
        return {stage.layers[1] for stage in self.stages} | {int(name.removeprefix("hidden.")) for name in early}


class _Build:
    """One build: the reference's hidden states go down the layers beside the graphs being written."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dialect: Dialect,
        options: BuildOptions,
        plan: _Plan,
        folder: Path,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._checkpoint, self._spec, self._weights = checkpoint, checkpoint.spec, checkpoint.weights
        self._dialect, self._options, self._plan, self._folder = dialect, options, plan, folder
        self._progress = progress
        self._model = _model_info(checkpoint)
        self._least_cosine = min(_LEAST_COSINE[options.precision], _LEAST_COSINE[dialect.vocab_precision])
        self._runner = StageRunner(OrtBackend(), folder, self._model, dialect.rows(self._spec))
        self._parity: list[Parity] = []
        self._states: dict[int, Array] = {}  # the reference's, by depth
        self._steps = self._spec.num_layers + 2 + len(plan.exit_stages)
        self._done = 0

    def write(self) -> Manifest:
        text = self._write_text()
        ids = np.array(self._probe_ids())
        self._rows = len(ids)
        embed, *blocks, head = self._plan.stages
        hidden, states = self._write_embed(embed, ids), self._states
        (chained,) = self._runner.run(embed, ids)
        self._accept(compare(embed.name, chained, states[0]))
        cos, sin = rope_tables(self._spec.rope, torch.arange(len(ids))[None])
        for block in blocks:
            hidden = self._write_block(block, hidden, cos, sin)
            start, end = block.layers
            self._accept(compare(block.name, self._runner.run(block, states[start])[0], states[end]))
            chained = self._runner.run(block, chained)[0]
        reference = self._write_head(head, hidden, ids)
        self._accept(*stage_parity(self._runner, head, reference))
        reference = self._write_exits(reference)
        top = reference.tops[head.name]
        self._accept(compare_logits("chain", self._runner.run(head, chained)[0], top), least_cosine=-1.0)
        reference.save(self._folder)
        return self._manifest(text)

    def _write_embed(self, stage: StageSpec, ids: Array) -> Tensor:
        """Write the table, and the head's with it; the reference's hidden states [1, T, D] of ``ids``."""
        table = torch.from_numpy(self._weights.read("model.embed_tokens.weight"))
        hidden = table[torch.from_numpy(ids)][None].clone()
        tied = self._spec.tie_word_embeddings
        file = WeightFile(self._folder / ("vocab.bin" if tied else "embed.bin"))
        stored = self._dialect.store_table(file, "vocab" if tied else "embed", table)
        del table
        if not tied:
            file.close()
            file = WeightFile(self._folder / "head.bin")
            self._head_table = self._dialect.store_table(
                file, "head", torch.from_numpy(self._weights.read("lm_head.weight"))
            )
        else:
            self._head_table = stored
        norm = torch.from_numpy(self._weights.read("model.norm.weight"))
        self._head_norm = self._dialect.store_vector(file, "/norm.weight", norm)
        file.close()
        embed_graph(stage, self._dialect, stored, self._folder)
        self._keep(0, hidden)
        self._step("embedding")
        return hidden

    def _write_block(self, stage: StageSpec, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Write one block, a layer in memory at a time; the reference's hidden states after it."""
        graph = LayerGraph(self._spec, stage, self._dialect, self._folder)
        for index in range(*stage.layers):
            layer = DecoderLayer.from_weights(self._spec, index, self._weights)
            exposed = f"hidden.{index}" if index in stage.hidden_layers else None
            graph.add_layer(str(index), layer.tensors, exposed)
            hidden = layer(hidden, cos, sin, LayerKV())
            self._keep(index + 1, hidden)
            self._step(f"layer {index}")
        graph.close_block()
        return hidden

    def _write_head(self, stage: StageSpec, hidden: Tensor, ids: Array) -> Reference:
        head_graph(self._spec, stage, self._dialect, self._head_table, self._head_norm, self._folder)
        norm = torch.from_numpy(self._weights.read("model.norm.weight"))
        name = "model.embed_tokens.weight" if self._spec.tie_word_embeddings else "lm_head.weight"
        table = torch.from_numpy(self._weights.read(name))
        logits = rms_norm(hidden, norm, self._spec.rms_norm_eps)[0] @ table.t()
        if (calibration := self._plan.calibration) is not None:
            self._draft_rows = table[torch.from_numpy(calibration.draft_ids)]
        self._step("head")
        depths, states = zip(*self._states.items(), strict=True)
        return Reference(ids, np.array(depths), np.stack(states), {stage.name: Top.of(logits.numpy())}, {})

    def _write_exits(self, reference: Reference) -> Reference:
        """Write and check the exits, if there are any; the reference with what they should compute."""
        exits, calibration = self._plan.exits, self._plan.calibration
        if exits is None or calibration is None:
            return reference
        reference = write_exits(
            self._folder, self._spec, self._dialect, exits, calibration, self._draft_rows, reference, self._step
        )
        for stage in exits.stages:
            self._accept(*stage_parity(self._runner, stage, reference))
        return reference

    def _write_text(self) -> TextInfo:
        files = self._checkpoint.tokenizer
        (self._folder / "tokenizer.json").write_text(files.tokenizer_json, encoding="utf-8")
        if files.chat_template is not None:
            (self._folder / "chat_template.jinja").write_text(files.chat_template, encoding="utf-8")
        template = None if files.chat_template is None else "chat_template.jinja"
        return TextInfo("tokenizer.json", template, files.special)

    def _probe_ids(self) -> list[int]:
        codec = TextCodec.load(self._folder, chat_template=None, special={})
        ids = [i for i in codec.encode(_PROBE_TEXT) if i < self._spec.vocab_size]
        return ids[: min(_PROBE_ROWS, self._spec.context_length)] or [0]

    def _accept(self, *parities: Parity, least_cosine: float | None = None) -> None:
        """Record a stage's figures. Raises BuildError when they are not good enough."""
        self._parity += parities
        least = self._least_cosine if least_cosine is None else least_cosine
        problem = next(filter(None, (failure(parity, least) for parity in parities)), None)
        if problem is None:
            return
        mend = (
            "try --precision fp32"
            if self._options.precision != "fp32"
            else "please report it with the checkpoint's config"
        )
        raise BuildError(f"parity failed at {self._options.precision}: {problem}; nothing was kept, {mend}")

    def _keep(self, depth: int, hidden: Tensor) -> None:
        """Remember the reference's hidden states [1, T, D] if they are needed again."""
        if depth in self._plan.depths_read:
            self._states[depth] = hidden.numpy()[0]

    def _step(self, what: str) -> None:
        self._done += 1
        self._progress(what, self._done, self._steps)

    def _manifest(self, text: TextInfo) -> Manifest:
        options, dialect = self._options, self._dialect
        quantized = {options.precision, dialect.vocab_precision} & {"int8", "int4"}
        manifest = Manifest(
            dialect=options.dialect,
            model=self._model,
            precision=PrecisionInfo(
                options.precision,
                dialect.vocab_precision,
                dialect.activations,
                options.block_size if quantized else None,
                dialect.matmul_activations,
            ),
            kv=KVInfo(dialect.activations, "[B, KvH, C, Hd]", "verify"),
            rows=dialect.rows(self._spec),
            stages=self._plan.stages,
            exits=self._plan.exits,
            text=text,
            sampling={name: float(value) for name, value in self._checkpoint.sampling.items()},
            parity={
                "rows": self._rows,
                "least_cosine": self._least_cosine,
                "stages": [asdict(p) for p in self._parity],
            },
            built_with=_built_with(self._checkpoint, options),
            files=file_infos(self._folder),
        )
        return _without_untested_rule(manifest, self._plan.calibration)


def _without_untested_rule(manifest: Manifest, calibration: Calibration | None) -> Manifest:
    """Entropies of stages with other numerics are others, so thresholds chosen on these promise nothing."""
    thresholds = None if calibration is None else calibration.thresholds
    if manifest.exits is None or thresholds is None or thresholds.numerics == manifest.numerics:
        return manifest
    return replace(manifest, exits=replace(manifest.exits, rule=None))


def _plan(checkpoint: Checkpoint, dialect: Dialect, options: BuildOptions) -> _Plan:
    spec, calibration = checkpoint.spec, None
    form = (dialect.activations, dialect.position_inputs(spec))
    if options.calibration is not None:
        calibration = read_calibration(options.calibration)
        check_fits(calibration, checkpoint, str(options.calibration))
    exits = () if calibration is None else calibration.exit_depths(spec.num_layers)
    stages = plan_stages(spec, plan_blocks(spec.num_layers, options.blocks, exits), *form)
    if calibration is None:
        return _Plan(stages)
    return _Plan(stages, calibration, plan_exits(spec, calibration, *form))


def _dialect(options: BuildOptions) -> Dialect:
    if options.precision not in PRECISIONS:
        raise BuildError(f"--precision {options.precision}: give one of {', '.join(PRECISIONS)}")
    if options.block_size not in BLOCK_SIZES:
        raise BuildError(f"--block-size {options.block_size}: give one of {', '.join(map(str, BLOCK_SIZES))}")
    if options.dialect == "ort":
        vocab_precision = options.vocab_precision or options.precision
        return OrtDialect(options.precision, vocab_precision, options.block_size, options.exact)
    if options.dialect != "standard":
        raise BuildError(f"--dialect {options.dialect}: give one of {', '.join(DIALECTS)}")
    if options.vocab_precision is not None:
        raise BuildError("--vocab-precision is for the ort dialect: the standard one decides it by --precision")
    return StandardDialect(options.precision, options.block_size, options.exact)


def _check_divisible(spec: ModelSpec, dialect: Dialect, options: BuildOptions) -> None:
    if not {dialect.vocab_precision, options.precision} & {"int8", "int4"}:
        return
    widths = {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size}
    widths["heads * head_dim"] = spec.num_heads * spec.head_dim
    for name, width in widths.items():
        if block_for(width, options.block_size) is None:
            raise BuildError(f"{name} is {width}, not a multiple of 32, which int8 and int4 need: use --precision fp16")


def _estimated_bytes(spec: ModelSpec, options: BuildOptions, dialect: Dialect, calibration: Calibration | None) -> int:
    total = 0.0
    if calibration is not None:
        weights = sum(values.size for head in calibration.heads for values in head.tensors.values())
        total += weights * _BYTES_PER_WEIGHT[options.precision]
        total += len(calibration.draft_ids) * spec.hidden_size * _BYTES_PER_WEIGHT[dialect.vocab_precision]
    for name, shape in spec.tensor_shapes().items():
        vocab = name in ("model.embed_tokens.weight", "lm_head.weight")
        precision = dialect.vocab_precision if vocab else options.precision
        total += float(np.prod(shape)) * _BYTES_PER_WEIGHT[precision]
    return int(total * 1.02) + (16 << 20)


def _model_info(checkpoint: Checkpoint) -> ModelInfo:
    spec = checkpoint.spec
    return ModelInfo(
        name=checkpoint.source["name"],
        architecture=spec.architecture,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        rope_type=spec.rope.rope_type,
        rope_inv_freq=spec.rope.inv_freq,
        rope_attention_factor=spec.rope.attention_factor,
        bos_token_id=spec.bos_token_id,
        eos_token_ids=spec.eos_token_ids,
    )


def _built_with(checkpoint: Checkpoint, options: BuildOptions) -> dict[str, Any]:
    packages = ("eexport", "torch", "onnx", "numpy", "tokenizers")
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "onnxruntime": onnxruntime.__version__,  # its package may be onnxruntime-gpu
        "checkpoint": checkpoint.source,
        "options": {**asdict(options), "calibration": options.calibration and options.calibration.name},
    }
