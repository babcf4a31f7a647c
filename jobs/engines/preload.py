"""What a fork server imports before it forks ranks, so that a rank's first step imports next to nothing.

torch's optimizers and deepspeed.initialize import hundreds of modules when first used. Which ones is
measured: `LOCAL_RANK=0 python -m jobs.engines.preload KIND` takes tiny steps in a fresh process and prints
the names that preload_KIND.txt holds. Importing them starts no thread, opens no socket and touches no GPU.
"""

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STAGES = {"native": (None,), "deepspeed_zero": (0, 1, 2, 3), "deepspeed_pipeline": (0, 1)}
"""Strategy kinds, and the ZeRO stages that each is recorded with."""


def preload_modules(strategy_kind: str) -> tuple[str, ...]:
    """Names to import before forking, in this order; one that does not import is to be passed over.

    Args:
        strategy_kind: strategy.kind of the run.

    Raises:
        FileNotFoundError: there is no engine of this kind.
    """
    path = Path(__file__).with_name(f"preload_{strategy_kind}.txt")
    return tuple(path.read_text(encoding="ascii").split())


def take_tiny_steps(strategy_kind: str) -> None:
    """Do once all that a rank's engine does, as the only rank of a run, at every stage and precision."""
    import torch
    from torch._C._distributed_c10d import FileStore

    from jobs.comm.groups import destroy_groups, init_groups
    from jobs.engines.base import MicroBatch
    from jobs.engines.build import build_engine
    from jobs.mesh import Mesh

    tokens = torch.arange(8).view(1, 8)  # [B, S]
    batch = MicroBatch(tokens, tokens, tokens, torch.zeros_like(tokens, dtype=torch.int32))
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(f"{folder}/store", 1)
        groups = init_groups(Mesh(), 0, store, "gloo", timeout_s=60.0)
        for stage in STAGES[strategy_kind]:
            for precision in ("fp32", "bf16") if stage != 0 else ("fp32",):
                spec = _tiny_spec(strategy_kind, stage, precision)
                engine = build_engine(spec, groups, torch.device("cpu"))
                engine.train_step([batch], 8, 1e-3)
                engine.evaluate(batch)
                engine.chunks()
                engine.after_load(1e-3)
        destroy_groups(groups)


def _tiny_spec(strategy_kind: str, stage: int | None, precision: str) -> Any:
    from jobs.spec.job import JobSpec

    shape = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "d_ff": 8}
    return JobSpec.model_validate(
        {
            "model": shape | {"vocab_size": 8, "max_seq_len": 8},
            "data": {"seq_len": 8},
            "optim": {"lr": 1e-3},
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "precision": precision},
            "strategy": {"kind": strategy_kind} | ({} if stage is None else {"stage": stage}),
        }
    )


def _record(strategy_kind: str) -> list[str]:
    """Names that bring in, one after another, all that tiny steps in a fresh process have imported."""
    program = (
        f"import sys; from jobs.engines.preload import take_tiny_steps; take_tiny_steps({strategy_kind!r}); "
        "sys.stdout.write('\\n'.join(['', 'MODULES', *sys.modules]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    roots = []
    # The engine first: it hides from DeepSpeed what DeepSpeed is better off without. Then backwards: a module
    # is listed when its import is complete, after those that it imports itself.
    for name in (f"jobs.engines.{strategy_kind}", *reversed(output.partition("MODULES")[2].split())):
        is_wanted = name not in sys.modules and name != __spec__.name
        if is_wanted and _imports(name):
            roots.append(name)
    return roots


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.stdout.write("\n".join([*_record(sys.argv[1]), ""]))
