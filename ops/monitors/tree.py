"""Small files of /sys and /proc, read without raising: a file that is missing or refuses is a None.

Knows no path of its own.
"""

from pathlib import Path


def read_text(path: Path) -> str | None:
    """Content without the newline at its end; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None


def read_int(path: Path) -> int | None:
    """A whole number, decimal or 0x; None where there is none."""
    text = read_text(path)
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None


def read_keyed_ints(path: Path) -> dict[str, int]:
    """Lines "key number", as memory.events and vmstat have them; other lines are left out."""
    found = {}
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[key] = int(value)
    return found


def subfolders(path: Path) -> list[Path]:
    """Folders (links to folders too) in a folder, by name; none where it is not there."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []
