"""A spec as flat parameters, and names that servers accept. Pure.

The text of a parameter depends on its value alone, never on the process (no memory addresses), so that a run
that goes on after a restart says the same of itself.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from ops.ledger import plain_value

MAX_NAME_CHARS = 250
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_.\- /]")


def flatten_params(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as dotted names and texts, sorted by name; lists of plain values stay one JSON text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten_params(value, f"{name}.")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            flat |= flatten_params({str(index): item for index, item in enumerate(value)}, f"{name}.")
        else:
            flat[name] = param_text(value)
    return dict(sorted(flat.items()))


def masked_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved spec fit to be shown: resources.env's values and a password in the MLflow URI become ***."""
    shown: dict[str, Any] = dict(spec)
    resources, tracking = shown.get("resources"), shown.get("tracking")
    if isinstance(resources, Mapping) and isinstance(resources.get("env"), Mapping):
        shown["resources"] = {**resources, "env": dict.fromkeys(resources["env"], "***")}
    if isinstance(tracking, Mapping) and isinstance(tracking.get("mlflow_uri"), str):
        uri = re.sub(r"//[^/@]*@", "//***@", tracking["mlflow_uri"])
        shown["tracking"] = {**tracking, "mlflow_uri": uri}
    return shown


def param_text(value: Any) -> str:
    """The text of one value, equal in every process: functions and classes by their qualified name."""
    if isinstance(value, str):
        return value
    qualified_name = getattr(value, "__qualname__", None)
    if isinstance(qualified_name, str):
        return f"{getattr(value, '__module__', '?')}.{qualified_name}"
    if value is None or isinstance(value, bool | int | float | Mapping | list | tuple):
        return json.dumps(plain_value(value), sort_keys=True)
    text = str(value)
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}" if re.search(r" at 0x[0-9a-fA-F]+", text) else text


def accepted_name(name: str) -> str:
    """The name itself where every server takes it, else the nearest one: forbidden characters become `_`.

    A changed name ends in eight hex digits of the original's hash, so two names never become one. At most
    MAX_NAME_CHARS characters.
    """
    parts = [part for part in _FORBIDDEN.sub("_", name).split("/") if part not in ("", ".", "..")]
    clean = "/".join(parts)
    if clean == name and 0 < len(name) <= MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{clean[: MAX_NAME_CHARS - 9]}_{digest}"
