"""The plain texts that a regular expression cannot do without: looked for first, because that is fast.

Knows only enough of the syntax to be sure; where it is not sure the answer is "none", which is always right.
"""

from typing import Final

MIN_CHARS: Final = 3
"""Shorter texts are in too many lines to be of use."""

Texts = frozenset[str]
NONE: Final[Texts] = frozenset()


def required_texts(regex: str) -> Texts:
    """Lower-case texts of which at least one is in whatever the regex matches; empty where not sure."""
    return _Reader(regex).alternatives()


class _Reader:
    """Reads a regex once, from left to right."""

    def __init__(self, regex: str) -> None:
        self._regex = regex
        self._place = 0

    def alternatives(self) -> Texts:
        """All alternatives up to the end of the group: one text of each, or none."""
        found: list[Texts] = [self._sequence()]
        while self._next() == "|":
            self._place += 1
            found.append(self._sequence())
        return frozenset().union(*found) if all(found) else NONE

    def _sequence(self) -> Texts:
        """The best of what must all be there: the longest shortest text."""
        candidates: list[Texts] = []
        run = ""
        while (char := self._next()) and char not in "|)":
            literal, group = self._atom()
            is_optional, is_repeated = self._quantifier()
            if literal is not None and not is_optional:
                run += literal
            if literal is None or is_optional or is_repeated:
                candidates.append(frozenset({run.lower()}))
                run = ""
            if group and not is_optional:
                candidates.append(group)
        candidates.append(frozenset({run.lower()}))
        best = max(candidates, key=lambda texts: (min(map(len, texts)), -len(texts)))
        return best if min(map(len, best)) >= MIN_CHARS else NONE

    def _atom(self) -> tuple[str | None, Texts]:
        """One character as text (empty for a place between characters), or None and what a group needs."""
        char = self._take()
        if char == "\\":
            following = self._take()
            if following in "bB":
                return "", NONE
            return (None if following.isalnum() else following), NONE
        if char == "[":
            self._skip_class()
            return None, NONE
        if char == "(":
            return None, self._group()
        return (None if char in ".^$" else char), NONE

    def _group(self) -> Texts:
        """The texts that a group needs; the place is behind its end afterwards."""
        is_look = False
        if self._next() == "?":
            start = self._place
            while self._next() not in (":", ">", "=", "!", ")"):
                self._place += 1
                if self._regex[start : self._place] == "?<" and self._next() in "=!":
                    break
            is_look = self._next() in ("=", "!") and self._regex[start : self._place] in ("?", "?<")
            if self._next() == ")":
                self._place += 1
                return NONE
            self._place += 1
        texts = self.alternatives()
        self._place += 1
        return NONE if is_look else texts

    def _quantifier(self) -> tuple[bool, bool]:
        """Whether the atom before may be missing, and whether it may come more than once."""
        char = self._next()
        if char not in ("?", "*", "+", "{"):
            return False, False
        start = self._place
        self._place = self._regex.index("}", start) + 1 if char == "{" else start + 1
        least = self._regex[start + 1 : self._place - 1].split(",")[0] if char == "{" else ""
        if self._next() == "?":
            self._place += 1
        return char in "?*" or least == "0", char != "?"

    def _skip_class(self) -> None:
        if self._next() == "^":
            self._place += 1
        if self._next() == "]":
            self._place += 1
        while self._next() not in ("]", ""):
            self._place += 2 if self._next() == "\\" else 1
        self._place += 1

    def _next(self) -> str:
        return self._regex[self._place : self._place + 1]

    def _take(self) -> str:
        char = self._next()
        self._place += 1
        return char
