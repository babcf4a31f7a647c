"""What `nvidia-smi nvlink -s` (states and speeds) and `-e` (error counts) say of each GPU's links.

Their XML report leaves the links out. Runs nothing.
"""

import re

from ops.monitors.gpu_readings import GpuReading

GPU = re.compile(r"GPU \d+: (.*?) \(UUID: ([^)]+)\)")
SPEED = re.compile(r"Link (\d+): ([\d.]+) GB/s")
INACTIVE = re.compile(r"Link (\d+): <?inactive>?", re.IGNORECASE)
ALL_INACTIVE = re.compile(r"all links are inactive", re.IGNORECASE)
ERRORS = re.compile(r"Link (\d+): (Replay|Recovery|CRC(?: FLIT| Data)?) Errors: (\d+)", re.IGNORECASE)
KINDS = {"replay": "nvlink_replays", "recovery": "nvlink_recoveries", "crc": "nvlink_crc_errors"}


def parse_nvlink_status(text: str) -> list[GpuReading]:
    """Readings in the order of the text; a GPU without links has no values."""
    products: dict[str, str] = {}
    values: dict[str, dict[str, float]] = {}
    own: dict[str, float] = {}
    for line in text.splitlines():
        if gpu := GPU.search(line):
            products[gpu[2]] = gpu[1]
            own = values.setdefault(gpu[2], {})
        elif speed := SPEED.search(line):
            own[f"nvlink_active/{speed[1]}"] = 1.0
            own[f"nvlink_gbyte_per_s/{speed[1]}"] = float(speed[2])
            own["nvlinks_down"] = 0.0
        elif inactive := INACTIVE.search(line):
            own[f"nvlink_active/{inactive[1]}"] = 0.0
            own.setdefault("nvlinks_down", 1.0)
        elif ALL_INACTIVE.search(line):
            own["nvlinks_down"] = 1.0
        elif errors := ERRORS.search(line):
            key = f"{KINDS[errors[2].split()[0].lower()]}/{errors[1]}"
            own[key] = own.get(key, 0.0) + float(errors[3])
    return [GpuReading(uuid, "", products[uuid], own) for uuid, own in values.items()]
