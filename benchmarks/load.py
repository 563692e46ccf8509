"""How many streams and tokens the client carries without losing one, and in how much memory.

`python benchmarks/load.py [STREAMS TOKENS]`: by default 512 streams at once with 500 tokens each, one event a
token, from a server in a process of its own that logs what it wrote. Every token counted by the client is held
against that log. It prints a table; nothing in it is a limit.
"""

import base64
import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from kvlab.measure import client

REPLAY_SERVER = Path(__file__).parents[1] / "tests" / "replay_server.py"
FIRST_MS, STEP_MS = 50, 40


def event(index, tokens):
    choice = {"index": 0, "text": " token", "finish_reason": "length" if index == tokens - 1 else None}
    usage = {"prompt_tokens": 2, "completion_tokens": index + 1, "total_tokens": index + 3}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice], "usage": usage}).encode() + b"\n\n"


def script(tokens, step_ms):
    writes = [(FIRST_MS + step_ms * i, event(i, tokens)) for i in range(tokens)]
    writes.append((writes[-1][0], b"data: [DONE]\n\n"))
    writes = [(at_ms, base64.b64encode(content).decode()) for at_ms, content in writes]
    return {"status": 200, "headers": {"content-type": "text/event-stream"}, "writes": writes, "close": "clean"}


def measure(base_url, streams, tokens):
    """One row: tokens that the server wrote and the client has, requests that failed, memory and processor time."""
    prompts = [[0, number] for number in range(streams)] + [[1, number] for number in range(streams)]
    point = {"loop": "closed", "concurrency": streams, "output_tokens": tokens}
    before_bytes, started_s, cpu_s = peak_memory_bytes(), time.perf_counter(), time.process_time()
    records = client.run_point(base_url, "m", point, prompts, 1, stagger_s=1.0, timeout_s=300)
    took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    measured = [record for record in records if record.get("phase") == "measured"]
    with urllib.request.urlopen(base_url + "/log") as answer:
        written = [len(entry["write_times_s"]) - 1 for entry in json.load(answer) if entry["script"] == 1]
    return {
        "streams": len(measured),
        "failed requests": sum(record["status"] != "ok" for record in measured),
        "tokens written by the server": sum(written),
        "tokens by the client's usage": sum(record["output_tokens"] or 0 for record in measured),
        "tokens by their arrivals": sum(sum(record["chunk_tokens"]) for record in measured),
        "seconds": round(took_s, 1),
        "CPU us a token": round(1e6 * cpu_s / max(1, sum(written)), 1),
        "peak memory MiB before": round(before_bytes / 2**20),
        "peak memory MiB after": round(peak_memory_bytes() / 2**20),
    }


def peak_memory_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(streams, tokens, step_ms=STEP_MS):
    """Start the server, measure once and end it; returns the row."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([script(2, step_ms), script(tokens, step_ms)], file)
        file.flush()
        server = subprocess.Popen([sys.executable, REPLAY_SERVER, file.name], stdout=subprocess.PIPE, text=True)
        try:
            return measure(f"http://127.0.0.1:{int(server.stdout.readline())}", streams, tokens)
        finally:
            server.kill()
            server.wait()


def main(streams=512, tokens=500):
    row = run(streams, tokens)
    for name, value in row.items():
        print(f"{name:<30}{value:>12,}")
    counts = {row[name] for name in row if name.startswith("tokens")}
    return 0 if counts == {streams * tokens} and not row["failed requests"] else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
