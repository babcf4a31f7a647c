"""What differs between the models of two checkpoints, from their fingerprints (jobs/spec/compare.py).

Shapes alone do not tell: another rope base has the same shapes and other weights
("NVIDIA-NeMo/Automodel#836"). Knows nothing of files.
"""

import json

from jobs.errors import CheckpointError


def differing_keys(saved: str, wanted: str) -> list[str]:
    """One phrase a differing key: `rope_theta is 10000.0 in the checkpoint and 500000.0 in this run`."""
    if saved == wanted:
        return []
    try:
        old, new = _flat(json.loads(saved)), _flat(json.loads(wanted))
    except (ValueError, AttributeError):
        return [f"the fingerprint is {saved!r} in the checkpoint and {wanted!r} in this run"]
    return [
        f"{key} is {_show(old, key)} in the checkpoint and {_show(new, key)} in this run"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def check_fingerprint(saved: str, wanted: str, where: str) -> None:
    """Refuse a checkpoint of another model, before anything is loaded.

    Raises:
        CheckpointError: names each differing key with both values.
    """
    differences = differing_keys(saved, wanted)
    if differences:
        raise CheckpointError(
            f"{where} is of another model: {'; '.join(differences)}. "
            "Use another run folder, or the model section that it was trained with."
        )


def _flat(value: dict[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found |= _flat(item, f"{prefix}{key}.")
        else:
            found[prefix + key] = item
    return found


def _show(values: dict[str, object], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"
