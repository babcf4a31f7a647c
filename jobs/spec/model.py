"""The model section: a Llama's shape with every dimension resolved. Presets are in presets.py."""

from typing import Literal, Self

from pydantic import Field, model_validator

from jobs.spec.base import SpecSection


class RopeScaling(SpecSection):
    """Llama 3.1's frequency scaling of rotary embeddings: Hugging Face's `llama3` (arXiv 2407.21783, 3.4)."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(default=8.0, gt=0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_seq_len: int = Field(default=8192, gt=0)


class ModelSpec(SpecSection):
    """A decoder-only Llama. A preset or a Hugging Face config.json gives defaults; explicit keys win."""

    kind: Literal["llama"] = "llama"
    preset: str | None = None
    """Name of the preset that gave the defaults (kept for the record once resolved)."""
    hf_config: str | None = None
    """Path of a Hugging Face config.json that gave the defaults (kept for the record once resolved)."""
    vocab_size: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    d_model: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    """Size of one attention head; the loader fills in d_model / n_heads where it is left out."""
    d_ff: int = Field(gt=0)
    max_seq_len: int = Field(gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    rope_theta: float = Field(default=500_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    init_std: float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}; "
                f"choose n_kv_heads in {[k for k in range(1, self.n_heads + 1) if self.n_heads % k == 0]}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd; rotary embeddings need pairs: choose an even one"
            )
        return self

    @property
    def n_params(self) -> int:
        """Number of trained parameters of the whole model (tied embeddings counted once)."""
        attention = self.d_model * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        layer = attention + 3 * self.d_model * self.d_ff + 2 * self.d_model
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return self.n_layers * layer + self.d_model + embeddings
