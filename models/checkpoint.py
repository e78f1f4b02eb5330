"""Opening a checkpoint: everything the rest needs to know about a model, checked before any work starts."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eexport.models.config import read_json, read_json_if_present, sampling_defaults, spec_from_config
from eexport.models.errors import CheckpointError
from eexport.models.gguf_config import config_from_gguf
from eexport.models.gguf_file import read_gguf
from eexport.models.gguf_tokenizer import tokenizer_from_gguf
from eexport.models.gguf_weights import ROPE_FACTORS, open_gguf_weights
from eexport.models.recipe import fetch, find_recipe, recipe_names
from eexport.models.rope import with_factors
from eexport.models.spec import ModelSpec
from eexport.models.tokenizer import TokenizerFiles, read_tokenizer
from eexport.models.weights import Weights, open_safetensors

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HARMLESS = ("rotary_emb.inv_freq", ROPE_FACTORS)
_HUB_FILES = ("*.json", "*.jinja", "model*.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A model as its authors published it.

    Attributes:
        spec: The decoder.
        weights: Its tensors, exactly those of `spec.tensor_shapes()` and harmless others.
        tokenizer: The text side.
        sampling: Recommended sampling settings; empty means greedy.
        source: Where it came from, for a manifest: name, format, dtypes, and any cap on the context.
    """

    spec: ModelSpec
    weights: Weights
    tokenizer: TokenizerFiles
    sampling: dict[str, float | int]
    source: dict[str, str]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder, a .gguf file or, where no such path exists, a recipe or the hub model "org/name".

    Raises:
        CheckpointError: It cannot be used as it is: unsupported, incomplete, or with tensors left over.
    """
    place = Path(path)
    if place.exists():
        return _open(place)
    recipe = find_recipe(str(path))
    if recipe is None:
        return _open(_download(str(path)))
    opened = _open(fetch(recipe))
    return replace(opened, source={**opened.source, "name": recipe.name})


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """A hash over the model's shape and all its weights, a tensor in memory at a time."""
    digest = hashlib.sha256(repr(checkpoint.spec).encode())
    for name in checkpoint.spec.tensor_shapes():
        digest.update(checkpoint.weights.read(name).data)
    return digest.hexdigest()


def _open(place: Path) -> Checkpoint:
    return _open_gguf(place) if place.is_file() else _open_folder(place)


def _open_folder(folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        hint = "; pass the .gguf file itself" if any(folder.glob("*.gguf")) else ""
        raise CheckpointError(f"{folder}: has no config.json, so it is not a Hugging Face checkpoint{hint}")
    config = read_json(folder / "config.json")
    generation = read_json_if_present(folder / "generation_config.json")
    spec = spec_from_config(config, generation, str(folder / "config.json"))
    weights = open_safetensors(folder)
    spec = _checked(spec, weights, str(folder))
    source = _source(folder.resolve().name, "safetensors", config, spec, weights)
    return Checkpoint(spec, weights, read_tokenizer(folder), sampling_defaults(generation), source)


def _open_gguf(path: Path) -> Checkpoint:
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: is neither a folder nor a .gguf file")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        raise CheckpointError(
            f"{path}: is one part of a split GGUF; join the parts first with llama-gguf-split --merge"
        )
    file = read_gguf(path)
    config = config_from_gguf(file)
    spec = spec_from_config(config, {}, str(path))
    # Only for llama does the converter reorder the rows of queries and keys.
    permuted = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if spec.architecture == "llama" else {}
    weights = open_gguf_weights(file, permuted)
    if ROPE_FACTORS in weights.names():
        spec = replace(spec, rope=with_factors(spec.rope, weights.read(ROPE_FACTORS).tolist()))
    spec = _checked(spec, weights, str(path))
    source = _source(str(file.metadata.get("general.name", path.stem)), "gguf", config, spec, weights)
    return Checkpoint(spec, weights, tokenizer_from_gguf(file), {}, source)


def _download(name: str) -> Path:
    """The local snapshot of a hub model."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        recipes = ", ".join(recipe_names())
        raise CheckpointError(f"{name}: no such file or folder, nor a model that comes by name ({recipes})")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises many unrelated types
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"{name}: no such path, and the hub did not give it ({reason})") from error


def _checked(spec: ModelSpec, weights: Weights, where: str) -> ModelSpec:
    """`spec` with the vocabulary of the embedding; raises unless the tensors are exactly what it needs."""
    names = weights.names()
    if _EMBEDDING in names:
        spec = replace(spec, vocab_size=weights.shape(_EMBEDDING)[0])
    expected = spec.tensor_shapes()
    if missing := sorted(expected.keys() - names):
        hint = "; set tie_word_embeddings to true if the head is the embedding" if missing == [_HEAD] else ""
        raise CheckpointError(f"{where}: lacks {_listed(missing)}{hint}")
    wrong = [
        f"{name} {weights.shape(name)}, expected {shape}"
        for name, shape in expected.items()
        if weights.shape(name) != shape
    ]
    if wrong:
        raise CheckpointError(f"{where}: the configuration does not fit {_listed(wrong)}")
    unused = {name for name in names - expected.keys() if not name.endswith(_HARMLESS)}
    if _HEAD in unused:
        if not np.array_equal(weights.read(_HEAD), weights.read(_EMBEDDING)):
            raise CheckpointError(
                f"{where}: tie_word_embeddings is true but {_HEAD} differs from {_EMBEDDING}; "
                "set it to false in config.json to use that head"
            )
        unused.remove(_HEAD)
    if unused:
        raise CheckpointError(f"{where}: holds what {spec.architecture} does not use: {_listed(sorted(unused))}")
    return spec


def _listed(items: list[str]) -> str:
    shown = ", ".join(items[:3])
    return shown if len(items) <= 3 else f"{shown} and {len(items) - 3} more"


def _source(name: str, form: str, config: Mapping[str, Any], spec: ModelSpec, weights: Weights) -> dict[str, str]:
    counts = Counter(weights.dtype(tensor) for tensor in spec.tensor_shapes())
    source = {
        "name": name,
        "format": form,
        "dtypes": ", ".join(f"{dtype} {n}" for dtype, n in counts.most_common()),
    }
    if spec.context_length < config["max_position_embeddings"]:
        source["context"] = f"{spec.context_length} of {config['max_position_embeddings']} tokens: the sliding window"
    return source
