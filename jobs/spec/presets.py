"""Named model shapes: defaults for the model section. Shapes only; no weights, no training settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from jobs.spec.tree import Json


@dataclass(frozen=True)
class Preset:
    """A model shape; head_dim is d_model / n_heads, so it follows when either is overridden."""

    about: str
    vocab_size: int
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    max_seq_len: int
    rope_theta: float = 500_000.0
    rope_factor: float | None = None
    """Factor of Llama 3.1's rope scaling; None has no scaling."""
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    moe: Mapping[str, Json] | None = None
    """Keys of model.moe; None has no experts."""

    def defaults(self) -> dict[str, Json]:
        """The keys of the model section that the preset gives."""
        scaling: Json = None
        if self.rope_factor is not None:
            scaling = {
                "kind": "llama3",
                "factor": self.rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_seq_len": 8192,
            }
        return {
            "kind": "llama",
            "vocab_size": self.vocab_size,
            "n_layers": self.n_layers,
            "d_model": self.d_model,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "d_ff": self.d_ff,
            "max_seq_len": self.max_seq_len,
            "norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "tie_embeddings": self.tie_embeddings,
            "moe": None if self.moe is None else dict(self.moe),
        }


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "tiny": Preset(
            "0.9 M parameters, any byte tokenizer: tests, seconds on a CPU",
            vocab_size=512, n_layers=4, d_model=128, n_heads=4, n_kv_heads=2, d_ff=384, max_seq_len=1024,
            rope_theta=10_000.0,
        ),
        "small": Preset(
            "1.6 M parameters, vocabulary of 2048: learns real text within a minute on two CPU cores",
            vocab_size=2048, n_layers=2, d_model=192, n_heads=6, n_kv_heads=2, d_ff=512,
            max_seq_len=1024, rope_theta=10_000.0,
        ),
        "125m": Preset(
            "GPT-3 small's shape as a Llama, GPT-2's vocabulary padded to 50304, tied embeddings",
            vocab_size=50_304, n_layers=12, d_model=768, n_heads=12, n_kv_heads=12, d_ff=2048,
            max_seq_len=2048, rope_theta=10_000.0, tie_embeddings=True,
        ),
        "1b": Preset(
            "Llama 3.2 1B",
            vocab_size=128_256, n_layers=16, d_model=2048, n_heads=32, n_kv_heads=8, d_ff=8192,
            max_seq_len=131_072, rope_factor=32.0, tie_embeddings=True,
        ),
        "3b": Preset(
            "Llama 3.2 3B",
            vocab_size=128_256, n_layers=28, d_model=3072, n_heads=24, n_kv_heads=8, d_ff=8192,
            max_seq_len=131_072, rope_factor=32.0, tie_embeddings=True,
        ),
        "8b": Preset(
            "Llama 3.1 8B",
            vocab_size=128_256, n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14_336,
            max_seq_len=131_072, rope_factor=8.0,
        ),
        "70b": Preset(
            "Llama 3.1 70B",
            vocab_size=128_256, n_layers=80, d_model=8192, n_heads=64, n_kv_heads=8, d_ff=28_672,
            max_seq_len=131_072, rope_factor=8.0,
        ),
        "405b": Preset(
            "Llama 3.1 405B",
            vocab_size=128_256, n_layers=126, d_model=16_384, n_heads=128, n_kv_heads=8, d_ff=53_248,
            max_seq_len=131_072, rope_factor=8.0,
        ),
        "llama2_7b": Preset(
            "Llama 2 7B",
            vocab_size=32_000, n_layers=32, d_model=4096, n_heads=32, n_kv_heads=32, d_ff=11_008,
            max_seq_len=4096, rope_theta=10_000.0,
        ),
        "tiny_moe": Preset(
            "1.8 M parameters, 0.9 M of them active, 8 experts in 3 of 4 layers: tests, seconds on a CPU",
            vocab_size=512, n_layers=4, d_model=128, n_heads=4, n_kv_heads=2, d_ff=384, max_seq_len=1024,
            rope_theta=10_000.0,
            moe={
                "n_experts": 8, "top_k": 2, "d_ff": 128, "n_shared_experts": 1, "n_dense_layers": 1,
                "router": "sigmoid", "balance_loss_coef": 1e-4, "z_loss_coef": 1e-4, "bias_update_rate": 1e-3,
            },
        ),
        "mixtral_8x7b": Preset(
            "Mixtral 8x7B: 46.7 B parameters, 12.9 B active; balance and z loss for training it",
            vocab_size=32_000, n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14_336,
            max_seq_len=32_768, rope_theta=1_000_000.0,
            moe={
                "n_experts": 8, "top_k": 2, "d_ff": 14_336, "balance_loss_coef": 0.01, "z_loss_coef": 1e-3,
            },
        ),
        "deepseek_16b": Preset(
            "DeepSeekMoE 16B's shape (arXiv 2401.06066), 2.8 B active: 64 fine experts and 2 shared; the "
            "router is DeepSeek-V3's (sigmoid, selection bias), attention is not (no MLA)",
            vocab_size=102_400, n_layers=28, d_model=2048, n_heads=16, n_kv_heads=16, d_ff=10_944,
            max_seq_len=4096, rope_theta=10_000.0, norm_eps=1e-6,
            moe={
                "n_experts": 64, "top_k": 6, "d_ff": 1408, "n_shared_experts": 2, "n_dense_layers": 1,
                "router": "sigmoid", "routed_scale": 1.0, "balance_loss_coef": 1e-4,
                "bias_update_rate": 1e-3,
            },
        ),
    }
)  # fmt: skip
