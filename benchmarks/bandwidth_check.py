"""Our read and copy bandwidth beside those of stress-ng's STREAM or of mbw, where one of them is installed.

`python benchmarks/bandwidth_check.py [--threads 2] [--mib 512]`: Debian has both (`apt-get install stress-ng mbw`),
kvlab needs neither. STREAM counts bytes read and written, as our copy does; mbw counts a copied byte once, so its
rate is doubled here. The load average stands beside the numbers: on a busy machine they say nothing.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess

from kvlab.measure.worker import Worker

REPETITIONS = 5
L3_SIZE = "32M"  # stress-ng takes arrays of four times this size


def ours(threads: int, mib: int) -> dict[str, list[float]]:
    """Best call of every repetition, in GB/s."""
    found: dict[str, list[float]] = {"read": [], "copy": []}
    with Worker(None, "float32", "cpu", threads) as worker:
        for repetition in range(REPETITIONS):
            for quantity, rates in found.items():
                size_bytes = mib * 2**20 // (2 if quantity == "copy" else 1)
                point = {"quantity": quantity, "size_bytes": size_bytes, "dtype": "float32", "device": "cpu"}
                (record,) = worker.measure_ceiling(point | {"threads": threads}, repetition)
                rates.append(record["bytes"] / min(record["samples_s"]) / 1e9)
    return found


def stream(threads: int) -> list[float]:
    """Rate of stress-ng's STREAM in GB/s, all instances together, bytes read and written."""
    command = ["stress-ng", "--stream", str(threads), "--stream-l3-size", L3_SIZE, "--timeout", "10", "--metrics"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rates = re.findall(r"memory rate: ([\d.]+) MB read/sec, ([\d.]+) MB write/sec", done.stdout + done.stderr)
    return [sum(float(read) + float(written) for read, written in rates) / 1e3] if len(rates) == threads else []


def mbw(mib: int) -> list[float]:
    """Rates of mbw's memcpy in GB/s, on one thread, read and written bytes together."""
    command = ["mbw", "-t0", "-n", str(REPETITIONS), str(mib // 2)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    rates = re.findall(r"^\d+\s.*Copy: ([\d.]+) MiB/s", said.stdout, re.M)
    return [2 * float(rate) * 2**20 / 1e9 for rate in rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1024)
    asked = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}; GB/s, best of {REPETITIONS} and median")
    rows = {f"kvlab {name}, {asked.threads} threads": rates for name, rates in ours(asked.threads, asked.mib).items()}
    rows["kvlab copy, 1 thread"] = ours(1, asked.mib)["copy"]
    if shutil.which("stress-ng"):
        rows[f"stress-ng stream, {asked.threads} instances"] = stream(asked.threads)
    if shutil.which("mbw"):
        rows["mbw memcpy x 2, 1 thread"] = mbw(asked.mib)
    for name, rates in rows.items():
        print(f"{name:36} {max(rates):6.1f} {statistics.median(rates):6.1f}" if rates else f"{name:36} said nothing")
    if len(rows) == 3:
        print("neither stress-ng nor mbw is installed: nothing to compare with")


if __name__ == "__main__":
    main()
