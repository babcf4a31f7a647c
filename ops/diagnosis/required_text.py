"""The plain text that a regular expression cannot do without: looked for first, because that is fast.

Knows only enough of the syntax to be sure; where it is not sure the answer is "", which is always right.
"""

_SPECIAL = frozenset("^$.|()[]{}*+?")
_QUANTIFIER = frozenset("*?{")


def required_text(regex: str) -> str:
    """The longest run of plain characters outside groups, in lower case.

    Empty where the regex has alternatives, or no run of three characters.
    """
    runs: list[str] = [""]
    depth = 0
    place = 0
    while place < len(regex):
        char = regex[place]
        if char == "|" and depth == 0:
            return ""
        if char in "[{":
            place = _end_of_class(regex, place) if char == "[" else regex.index("}", place) + 1
            runs.append("")
            continue
        literal, width = _literal(regex, place)
        place += width
        depth += (literal is None and char == "(") - (literal is None and char == ")")
        is_optional = place < len(regex) and regex[place] in _QUANTIFIER
        if literal is None or depth > 0 or is_optional:
            runs.append("")
        else:
            runs[-1] += literal
    longest = max(runs, key=len)
    return longest.lower() if len(longest) > 2 else ""


def _literal(regex: str, place: int) -> tuple[str | None, int]:
    """The plain character at a place and how many characters spell it; None for anything else."""
    char = regex[place]
    if char == "\\":
        following = regex[place + 1 : place + 2]
        return (None if following.isalnum() else following), 2
    return (None if char in _SPECIAL else char), 1


def _end_of_class(regex: str, place: int) -> int:
    """The place after a character class."""
    place += 1
    if regex[place : place + 1] == "^":
        place += 1
    if regex[place : place + 1] == "]":
        place += 1
    while place < len(regex) and regex[place] != "]":
        place += 2 if regex[place] == "\\" else 1
    return place + 1
