"""Stop strings in a stream: no character of one is ever given out, wherever the tokens are cut."""

from collections.abc import Sequence


class StopMatcher:
    """Look for stop strings in text that comes in pieces; the one that starts first wins.

    The result depends on the text alone and not on how it was cut. So a stop string found inside what may
    become another that starts earlier is not acted upon until that one is complete, fails, or the text ends.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for ``stops``, none of them empty."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""  # from here on the text is, or may become, a stop string
        self.matched = False  # whether a stop string ended the text

    def push(self, delta: str) -> tuple[str, bool]:
        """Add text; returns what is now safe to give out, and whether a stop string ended the text."""
        if self.matched:
            return "", True
        if not self._stops:
            return delta, False
        text = self._held + delta
        match, candidate = self._first_match(text), self._first_candidate(text)
        self.matched = match < len(text) and match <= candidate
        self._held = "" if self.matched else text[candidate:]
        return text[: min(match, candidate)], self.matched

    def flush(self) -> str:
        """The text held back, now that no more comes; ``matched`` says whether a stop string cut it."""
        text, self._held = self._held, ""
        match = self._first_match(text)
        self.matched = self.matched or match < len(text)
        return text[:match]

    def _first_match(self, text: str) -> int:
        found = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, default=len(text))

    def _first_candidate(self, text: str) -> int:
        """Where the first unfinished stop string starts, one that the end of the text cuts."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(len(stop) > len(text) - start and stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
