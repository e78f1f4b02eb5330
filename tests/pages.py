"""Reading a page of HTML: its elements and text, and what must hold of every page."""

import re
from html.parser import HTMLParser


class Elements(HTMLParser):
    """Every element with its attributes, and all text outside of style and script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in ("style", "script"):
            self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def check_loads_nothing(page: str) -> None:
    """No element, attribute or style that makes a browser ask for anything."""
    for tag, attributes in Elements(page).found:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert value and (value.startswith("#") or tag == "a"), f"<{tag} {name}={value}>"
    assert not re.search(r"@import|url\((?!#)", page)


def check_themes(page: str) -> None:
    """Drawings take their colours from the page, which sets each for both themes."""
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert not re.findall(r"(?:fill|stroke): *#\w+", drawing)
    for name in set(re.findall(r"var\(--([\w-]+)\)", page)):
        assert page.count(f"--{name}:") in (1, 3), f"{name} is set for one theme only"
    assert "prefers-color-scheme:dark" in page and "[data-theme=dark]" in page


def check_ids(page: str) -> None:
    """Every id is there once, and what refers to one finds it."""
    elements = Elements(page).found
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in elements:
        for value in attributes.values():
            for target in re.findall(r"url\(#([^)]+)\)|^#(\S+)$", value or ""):
                assert (target[0] or target[1]) in ids
