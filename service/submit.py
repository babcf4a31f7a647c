"""Hand a spec to a cluster through Ray Jobs; code and resolved spec travel with the job."""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jobs.errors import PacktrainError
from jobs.spec.load import load_spec, resolved_json
from service.env import get_env, prepare_ray_environment
from service.origin import FLOORS, find_source_root
from service.run_store import new_run_id
from service.runner import with_absolute_storage

STOP_WAIT_S = 180
"""How long Ray gives the driver to save and leave after `ray job stop` before it kills it."""


def submit_run(spec_path: Path, overrides: Sequence[str], address: str) -> dict[str, str]:
    """Submit; returns run_id, job_id, run_dir.

    Raises:
        SpecError: the spec is wrong (found here, before anything is sent).
        PacktrainError: no cluster answers at `address`.
    """
    spec = with_absolute_storage(load_spec(spec_path, overrides))
    run_id = new_run_id(spec, spec_path)
    spec = spec.model_copy(update={"run": spec.run.model_copy(update={"name": run_id})})
    prepare_ray_environment()
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = str(error).rstrip(".")
        raise PacktrainError(
            f"no Ray dashboard answers at {address}: {why}. Start one with `ray start --head`."
        ) from error
    with tempfile.TemporaryDirectory(prefix="packtrain-submit-") as staging:
        folder = Path(staging)
        for floor in FLOORS:
            shutil.copytree(
                find_source_root() / floor, folder / floor, ignore=shutil.ignore_patterns("__pycache__")
            )
        (folder / "spec.json").write_text(resolved_json(spec))
        job_id = client.submit_job(
            entrypoint=f"{sys.executable} -m service run spec.json",
            submission_id=f"packtrain-{run_id}",
            runtime_env={
                "working_dir": str(folder),
                "env_vars": {
                    "RAY_AUTH_MODE": get_env("RAY_AUTH_MODE") or "",
                    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
                },
            },
            metadata={"packtrain_run_id": run_id},
        )
    return {"run_id": run_id, "job_id": job_id, "run_dir": str(Path(spec.run.storage) / run_id)}
