"""Prompts that the model writes itself: beginnings of a user's message, which it is left to complete.

A chat model that is given the opening of a user's turn goes on as a user would (Magpie, Xu et al. 2024,
arXiv 2406.08464). So there is as much to train on as one has time for, of the kinds that matter, and no data set to
fetch. The beginnings are the project's own and hold places that are filled at random.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).parent / "starts.json"
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Beginning:
    """The first words of a user's message, and the kind of text that they ask for."""

    kind: str
    text: str


class Beginnings:
    """As many beginnings as one asks for; the kinds take turns."""

    def __init__(self, seed: int) -> None:
        """``seed`` decides all of them; a beginning does not depend on those before it."""
        found = json.loads(_FILE.read_text(encoding="utf-8"))
        self._places: dict[str, list[str]] = found.pop("places")
        self._patterns: dict[str, list[str]] = found
        self._kinds = sorted(found)
        self._seed = seed

    def __getitem__(self, index: int) -> Beginning:
        """Number ``index`` of them, from 0."""
        choice = random.Random(f"{self._seed}/{index}")
        kind = self._kinds[index % len(self._kinds)]
        bags: dict[str, list[str]] = {}

        def fill(place: re.Match[str]) -> str:
            name = place[1]
            if name not in self._places:  # braces of code
                return place[0]
            bag = bags.setdefault(name, [])
            if not bag:  # the words of one beginning differ for as long as they last
                bag += choice.sample(self._places[name], len(self._places[name]))
            return bag.pop()

        return Beginning(kind, _PLACE.sub(fill, choice.choice(self._patterns[kind])))
