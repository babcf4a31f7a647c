"""The strict, frozen base of every spec section. Does not load files: see load.py."""

from pydantic import BaseModel, ConfigDict


class SpecSection(BaseModel):
    """A section of the spec: unknown keys and wrong types are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
