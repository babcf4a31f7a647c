"""A run folder as a stopped run leaves it: prepared data, committed checkpoints with moments, no driver."""

from dataclasses import replace
from pathlib import Path

import torch

from jobs.events import Progress
from jobs.mesh import Mesh
from jobs.spec.compare import model_fingerprint
from jobs.spec.load import load_spec
from jobs.spec.model import parameter_shapes
from jobs.state import Chunk
from ops.checkpoint.manifest import Identity
from ops.checkpoint.writer import AsyncWriter, Peers
from service.run_store import STOPPED, create_run, write_state
from service.runner import prepare_data, with_absolute_storage
from tests.support.checkpoints import Events


def stopped_run(spec_path: Path, steps: tuple[int, ...], status: str = STOPPED) -> Path:
    """The folder of the run that a spec with run.name and run.storage names, with checkpoints at `steps`."""
    spec = with_absolute_storage(load_spec(spec_path))
    prepared = prepare_data(spec, lambda _line: None)
    run_dir = Path(spec.run.storage) / str(spec.run.name)
    state = create_run(spec, run_dir)
    known = replace(
        state, status=status, data_dir=str(prepared.cache_dir), data_fingerprint=prepared.fingerprint
    )
    write_state(run_dir, replace(known, attempts=1, driver_pid=0))
    generator = torch.Generator().manual_seed(4)
    chunks = [
        Chunk(
            f"{kind}/{name}",
            shape,
            (0,) * len(shape),
            torch.randn(shape, generator=generator),
            is_writer=True,
        )
        for kind in ("model", "optim/exp_avg", "optim/exp_avg_sq")
        for name, shape in parameter_shapes(spec.model).items()
    ]
    chunks.append(Chunk("optim/step", (1,), (0,), torch.ones(1, dtype=torch.int64), is_writer=True))
    identity = Identity(model_fingerprint(spec.model), spec.strategy.kind, Mesh(dp=1), attempt=0)
    writer = AsyncWriter(run_dir / "checkpoints", identity, Peers(), Events())
    for step in steps:
        assert writer.save(chunks, Progress(step, step * spec.train.global_batch_size)) == "started"
        assert writer.wait(30)
    return run_dir
