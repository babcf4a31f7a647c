"""The fake libnvidia-ml.so.1: compiled with the machine's C compiler, and told what to say."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "nvml" / "fake_nvml.c"

HEALTHY = {
    "name": "NVIDIA H100 80GB HBM3",
    "temperature/0": 55,
    "temperature_threshold/1": 92,
    "power_mw": 612_000,
    "power_limit_mw": 700_000,
    "power_limit_default_mw": 700_000,
    "pstate": 0,
    "clock/1": 1755,
    "clock_max/1": 1980,
    "pcie_gen": 5,
    "pcie_gen_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_replays": 3,
    "clocks_event_reasons": 0x4,
    "ecc/0/0": 12,
    "ecc/0/1": 40,
    "ecc/1/0": 0,
    "ecc/1/1": 1,
    "ecc/1/1/7": 0,
    "remapped_rows": "0 1 0 0",
    "nvlink_active/0": 1,
    "nvlink_active/1": 1,
    "nvlink_active/2": 0,
    "nvlink_errors/0/0": 5,
    "nvlink_errors/0/1": 0,
    "nvlink_errors/0/2": 1,
    "nvlink_errors/0/3": 0,
    "field/230/0": 0,
    "field/180/0": 0,
    "processes": "100 1000000 101 2000000",
}
"""A GPU at work: capped by its power limit, a corrected error now and then, one unconnected link."""


@dataclass
class FakeNvml:
    """The node's GPUs as the library shows them; what a test changes is seen by the next call."""

    path: Path
    answers: dict[str, object]

    def set(self, gpu: int | None = None, **answers: object) -> None:
        """Change answers; names as in the C file, with __ for a slash. None takes one away."""
        prefix = "" if gpu is None else f"{gpu}."
        self.put({prefix + name.replace("__", "/"): value for name, value in answers.items()})

    def put(self, answers: dict[str, object]) -> None:
        """Change answers by their full keys."""
        self.answers |= answers
        lines = (f"{key} {value}\n" for key, value in self.answers.items() if value is not None)
        self.path.write_text("".join(lines))

    def plug(self, n_gpus: int) -> None:
        """So many healthy GPUs."""
        self.put({"gpus": n_gpus})
        for gpu in range(n_gpus):
            own = {"uuid": f"GPU-{gpu}", "pci_bus_id": f"00000000:{gpu + 1:02X}:00.0"}
            self.put({f"{gpu}.{key}": value for key, value in {**HEALTHY, **own}.items()})


def build(folder: Path) -> Path:
    """Compile it; skips the test where there is nothing to do that with."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc, gcc) to build the fake libnvidia-ml.so.1 with")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-std=c11", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library
