"""The strict, frozen base of every spec section. Does not load files: see load.py."""

from pydantic import BaseModel, ConfigDict


class SpecSection(BaseModel):
    """A section of the spec: unknown keys, wrong types and numbers that are not finite are refused.

    Values never change after loading.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
