"""What a bundle holds, from its manifest alone, and whether it does here what it did where it was built."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from eexport.runtime.chain import Chain
from eexport.runtime.console import size
from eexport.runtime.device import open_backend
from eexport.runtime.errors import BundleError
from eexport.runtime.manifest import ExitsInfo, Manifest, check_files, read_manifest
from eexport.runtime.verify import Parity, Reference, failure, rows_that_differ, verify_bundle

ROW_COUNTS = (2, 3, 4, 5, 8)
"""Rows at once for which ``check`` compares every bit: what drafting verifies together."""


def summarise(bundle: Path, manifest: Manifest) -> dict[str, Any]:
    """Facts about a bundle under plain names, ready for JSON; sizes in bytes."""
    model, per_token = manifest.model, manifest.kv_bytes_per_token()
    sizes = {name: info.bytes for name, info in manifest.files.items()}
    owners = {name: Path(name).stem for name in sizes}
    cosines = {row["stage"]: row["cosine"] for row in manifest.parity.get("stages", [])}
    stages = manifest.all_stages
    names = [stage.name for stage in stages]
    return {
        "bundle": str(bundle),
        "schema_version": manifest.schema_version,
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "heads": model.num_heads,
            "kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "rope_type": model.rope_type,
            "chat_template": manifest.text.chat_template is not None,
        },
        "precision": dataclasses.asdict(manifest.precision),
        "dialect": manifest.dialect,
        "rows": dataclasses.asdict(manifest.rows),
        "blocks": [list(block.layers) for block in manifest.blocks],
        "stages": [
            {
                "stage": stage.name,
                "layers": list(stage.layers) if stage.kind == "block" else None,
                "bytes": sum(sizes[name] for name in sizes if owners[name] == stage.name),
                "cosine": cosines.get(stage.name),
            }
            for stage in stages
        ],
        "shared_files": {name: sizes[name] for name in sorted(sizes) if owners[name] not in names},
        "bytes": sum(sizes.values()),
        "candidate_exits": list(manifest.boundaries),
        "exits": None if manifest.exits is None else _exits(manifest, manifest.exits),
        "kv": {
            "dtype": manifest.kv.dtype,
            "bytes_per_token": per_token,
            "bytes_per_1k_tokens": per_token * 1000,
            "bytes_at_full_context": per_token * model.context_length,
        },
        "sampling": manifest.sampling,
        "parity": manifest.parity,
        "built_with": manifest.built_with,
    }


def headlines(facts: dict[str, Any]) -> dict[str, str]:
    """The facts of ``summarise``, but for the stages, as labelled lines."""
    model, precision, kv, built = facts["model"], facts["precision"], facts["kv"], facts["built_with"]
    checkpoint = built.get("checkpoint", {})
    blocks = "" if precision["block_size"] is None else f"blocks of {precision['block_size']}, "
    versions = ", ".join(f"{name} {built[name]}" for name in ("torch", "onnx", "onnxruntime") if name in built)
    return {
        "model": f"{model['name']} ({model['architecture']})",
        "shape": f"{model['layers']} layers of {model['hidden_size']}, {model['heads']}/{model['kv_heads']} "
        f"heads of {model['head_dim']}, vocabulary {model['vocab_size']}",
        "precision": f"{precision['weights']}, vocabulary {precision['vocab_weights']}, {blocks}activations "
        f"{precision['activations']} ({precision['matmul_activations']} in matrix products)",
        "dialect": facts["dialect"],
        "rows": "exact" if facts["rows"]["exact"] else "not exact (built --not-exact)",
        "size": size(facts["bytes"]),
        **_exit_lines(facts),
        "KV memory": f"{size(kv['bytes_per_1k_tokens'])} per 1k tokens, {size(kv['bytes_at_full_context'])} "
        f"at the full context of {model['context_length']} ({kv['dtype']})",
        "built from": f"{checkpoint.get('format', '?')} ({checkpoint.get('dtypes', '?')})",
        "built by": f"eexport {built.get('eexport', '?')} on {built.get('date', '?')} ({versions})",
    }


def exit_agreement(facts: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: how often each head says what the full model says, by the calibration's own record.

    By kind of text, on the test prompts of the first source; no rows where nothing is recorded.
    """
    heads = ((facts["exits"] or {}).get("record") or {}).get("heads", [])
    if not heads:
        return [], []
    source = min(heads[0]["agreement"])
    kinds = list(heads[0]["agreement"][source])
    rows = [[head["name"], *(f"{head['agreement'][source][kind]:.1%}" for kind in kinds)] for head in heads]
    return [f"says the full model's token ({source} prompts)", *kinds], rows


def _exits(manifest: Manifest, exits: ExitsInfo) -> dict[str, Any]:
    """Trained exits; a threshold is None where none was chosen, and for a head that only drafts."""
    rule, taken = exits.rule, [head.name for head in manifest.exit_heads]
    entropy = {} if rule is None else dict(zip(taken, rule.entropy, strict=True))
    return {
        "heads": [
            {
                "stage": head.name,
                "depth": head.layers[0],
                "reads": [source.name for source in head.sources],
                "leaves": head.name in taken,
                "entropy_threshold": entropy.get(head.name),
            }
            for head in exits.heads
        ],
        "draft_vocabulary": exits.heads[0].outputs[1].shape[-1],
        "predictor_reads": None if exits.predictor is None else [source.name for source in exits.predictor.sources],
        "previous_threshold": rule.previous if rule and rule.previous < math.inf else None,
        "record": exits.record,
    }


def _exit_lines(facts: dict[str, Any]) -> dict[str, str]:
    exits, candidates = facts["exits"], ", ".join(map(str, facts["candidate_exits"]))
    if exits is None:
        return {"exits": f"candidates after layers {candidates or '-'}; trained: none"}
    heads = ", ".join(f"{head['depth']} ({'+'.join(head['reads'])}; {_use(head)})" for head in exits["heads"])
    rest = [f"draft vocabulary {exits['draft_vocabulary']}"]
    if exits["predictor_reads"] is not None:
        rest.append(f"predictor on {', '.join(exits['predictor_reads'])}")
    if exits["previous_threshold"] is not None:
        rest.append(f"full depth after a token of over {exits['previous_threshold']:.3g} nats")
    return {"exits": f"after layers {heads}", "": "; ".join(rest)}


def _use(head: dict[str, Any]) -> str:
    if not head["leaves"] or head["entropy_threshold"] is None:
        return "drafts"
    return f"under {head['entropy_threshold']:.3g} nats" if head["entropy_threshold"] else "never taken"


def check(bundle: Path, device: str = "auto", threads: int | None = None) -> dict[str, Any]:
    """Hashes, parity of every stage and of the chain, and bits that the number of rows does not change.

    Returns:
        ``ok``, ``failures`` (a line each), ``stages`` (the parity of each here), ``rows`` (row counts whose
        bits differ, with the largest difference), ``device``, ``backend``.

    Raises:
        BundleError: It is no bundle at all; an altered or missing file is a failure instead.
        DeviceError: The device cannot be used here.
    """
    manifest = read_manifest(bundle)
    backend = open_backend(device, threads)
    results: list[Parity] = []
    rows: dict[int, float] = {}
    try:
        check_files(bundle, manifest)
        results = verify_bundle(bundle, manifest, backend)
        ids = Reference.load(bundle).token_ids.tolist()
        rows = rows_that_differ(Chain(bundle, manifest, backend, len(ids)), ids, ROW_COUNTS)
        failures = _parity_failures(manifest, results) + (_row_failures(rows) if manifest.rows.exact else [])
    except BundleError as error:
        failures = [str(error)]
    return {
        "ok": not failures,
        "failures": failures,
        "stages": [dataclasses.asdict(parity) for parity in results],
        "rows": rows,
        "device": backend.device,
        "backend": backend.name,
    }


def _parity_failures(manifest: Manifest, results: list[Parity]) -> list[str]:
    try:
        least = float(manifest.parity["least_cosine"])
    except (KeyError, TypeError, ValueError):
        raise BundleError("manifest.json records no parity.least_cosine: build the bundle again") from None
    # Errors of the stages add up along the chain, so only its being finite is asked for, as at build time.
    problems = [failure(parity, -1.0 if parity.stage == "chain" else least) for parity in results]
    return [problem for problem in problems if problem is not None]


def _row_failures(rows: dict[int, float]) -> list[str]:
    return [f"{count} rows at once differ from one at a time by up to {gap:.3g}" for count, gap in rows.items()]
