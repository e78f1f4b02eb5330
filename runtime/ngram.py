"""Prompt lookup: what followed the last time the text read as it does now is likely to follow again.

After Saxena, "Prompt Lookup Decoding" (2023). Drafts cost no run of the model; they pay where a text repeats itself or
its prompt, as code, JSON and summaries do.
"""

from collections.abc import Sequence


class NgramIndex:
    """Where every n-gram of a growing text was last seen. Exact: n-grams are compared, not their hashes."""

    def __init__(self, longest: int = 5, shortest: int = 2) -> None:
        """Look for the last ``longest`` tokens first, then for fewer, down to ``shortest``. Raises ValueError."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens")
        self._tokens: list[int] = []
        self._sizes = range(longest, shortest - 1, -1)
        # A place is the index of the token that follows an n-gram, so the end of the text, where none does, is no
        # place yet. Of each place the one before it with the same n-gram is kept, 0 for none: `trim` goes back to it.
        self._last: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in self._sizes}
        self._before: dict[int, list[int]] = {size: [] for size in self._sizes}

    def __len__(self) -> int:
        """Tokens in the text."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add ``tokens`` to the end of the text."""
        for token in tokens:
            place = len(self._tokens)
            for size in self._sizes:
                if size <= place:
                    gram, last = self._gram(size), self._last[size]
                    self._before[size].append(last.get(gram, 0))
                    last[gram] = place
            self._tokens.append(token)

    def trim(self, count: int) -> None:
        """Forget the last ``count`` tokens. Raises ValueError when there are fewer."""
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot trim {count} of {len(self._tokens)} tokens")
        for _ in range(count):
            self._tokens.pop()
            for size in self._sizes:
                if size <= len(self._tokens):
                    gram, before = self._gram(size), self._before[size].pop()
                    if before:
                        self._last[size][gram] = before
                    else:
                        del self._last[size][gram]

    def propose(self, count: int) -> list[int]:
        """The ``count`` tokens that followed the last earlier occurrence of the text's longest known suffix.

        Where the text ends before so many, the occurrence and the suffix are one period apart, and it is gone through
        again. Empty when no suffix occurred before.
        """
        for size in self._sizes:
            if size <= len(self._tokens) and (place := self._last[size].get(self._gram(size))):
                followed = self._tokens[place : place + count]
                return [followed[index % len(followed)] for index in range(count)]
        return []

    def _gram(self, size: int) -> tuple[int, ...]:
        """The last ``size`` tokens."""
        return tuple(self._tokens[-size:])
