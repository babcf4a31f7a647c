"""One attempt = one TorchTrainer.fit(): places the worker shells, retries nothing, reports how it ended."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig

from jobs.spec.job import JobSpec
from service.controllers import Controllers
from service.worker import ShellBackend, ShellConfig, shell_main


@dataclass(frozen=True)
class FitFailure:
    """Why a fit() ended without all shells returning."""

    kind: str
    """ "worker" (a worker actor died or raised), "controller", "start" (workers could not be placed or
    started)."""
    text: str
    ranks: tuple[int, ...] = ()


def run_attempt(
    spec: JobSpec,
    config: ShellConfig,
    run_dir: Path,
    selector: Mapping[str, str],
    controllers: Controllers,
) -> FitFailure | None:
    """Run one attempt to its end; None when every shell returned. Blocks; safe in a thread of its own.

    Args:
        spec: what this attempt runs: its layout may be smaller than the run's.
        config: for the shells.
        run_dir: folder of the run.
        selector: Ray label selector of the workers: keeps off nodes.
        controllers: the run's.
    """
    # It imports torch, which takes seconds: here, so that the coordinator's process starts meanwhile.
    from service.bare_trainer import BareTrainer

    needs = spec.resources
    gpus = {"GPU": float(needs.gpus_per_worker)} if needs.gpus_per_worker else {}
    trainer = BareTrainer(
        shell_main,
        train_loop_config=asdict(config),
        torch_config=ShellBackend(),  # type: ignore[arg-type]
        # The class that type checkers see is the deprecated one of the same name; so below.
        scaling_config=ScalingConfig(  # type: ignore[call-arg]
            num_workers=spec.world_size,
            use_gpu=needs.gpus_per_worker > 0,
            resources_per_worker={"CPU": needs.cpus_per_worker, **gpus},
            placement_strategy=needs.placement,
            label_selector=dict(selector) or None,
        ),
        run_config=RunConfig(
            name=f"{run_dir.name}-{config.attempt:03d}",
            storage_path=str(run_dir / "ray"),
            failure_config=FailureConfig(  # type: ignore[call-arg]
                max_failures=0, controller_failure_limit=0, max_preemption_failures=0
            ),
        ),
    )
    trainer.title = f"packtrain[{run_dir.name}] controller of attempt {config.attempt}"
    trainer.controllers = controllers
    try:
        trainer.fit()
    except ray.train.WorkerGroupError as error:
        return FitFailure("worker", str(error), tuple(sorted(error.worker_failures)))
    except ray.train.ControllerError as error:
        return FitFailure("start", str(error))
    except Exception as error:  # of Ray or of what it calls: the thread that runs this has nobody to raise to
        return FitFailure("controller", f"{type(error).__name__}: {error}")
    return None


@contextlib.contextmanager
def coordinator_actor(run_dir: Path, spec: JobSpec, name: str) -> Iterator[Any]:
    """The run's coordinator, on the driver's node; it goes when the driver does."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from service.coordinator import Coordinator

    n_calls = 1000 + 2 * spec.world_size  # each shell keeps one call waiting for orders
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = (
        ray.remote(Coordinator)
        .options(name=name, num_cpus=0, max_concurrency=n_calls, scheduling_strategy=here)
        .remote(str(run_dir), spec.resilience.model_dump_json())
    )
    try:
        yield actor
    finally:
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):  # it, or Ray itself, may be gone
            ray.kill(actor)  # type: ignore[arg-type]
