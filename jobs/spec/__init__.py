"""The schema of a run (pydantic, no torch) and its strict loader."""
