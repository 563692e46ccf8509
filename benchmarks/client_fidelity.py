"""How far our client's TTFT and TPOT lie from a server's own log, and what a token costs it.

`python benchmarks/client_fidelity.py [STREAMS...]`: a server that writes its first token after 50 ms and
63 more 20 ms apart, four requests per stream; server and client on a CPU each. Sends are spread over one
request's duration, then all at once. Needs a quiet machine: the load average is printed beside the numbers.
"""

import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from kvlab.analyse import definitions
from kvlab.measure import client

REPLAY_SERVER = Path(__file__).parents[1] / "tests" / "replay_server.py"
FIRST_MS, STEP_MS, TOKENS = 50, 20, 64
DURATION_S = (FIRST_MS + STEP_MS * (TOKENS - 1)) / 1000
REQUESTS_PER_STREAM = 4


def event(index):
    choice = {"index": 0, "text": " token", "finish_reason": "length" if index == TOKENS - 1 else None}
    usage = {"prompt_tokens": 8, "completion_tokens": index + 1, "total_tokens": index + 9}
    payload = {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage}
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def script():
    writes = [(FIRST_MS + STEP_MS * i, event(i)) for i in range(TOKENS)]
    writes.append((writes[-1][0], b"data: [DONE]\n\n"))
    writes = [(at_ms, base64.b64encode(content).decode()) for at_ms, content in writes]
    headers = {"content-type": "text/event-stream"}
    return {"status": 200, "headers": headers, "writes": writes, "close": "clean"}


def measure(base_url, streams, stagger_s):
    """One row: errors in milliseconds and percent, CPU microseconds per token, lag of the event loop."""
    point = {"loop": "closed", "concurrency": streams, "output_tokens": TOKENS}
    prompts = [[0, number] for number in range(streams * (1 + REQUESTS_PER_STREAM))]
    started_s = time.process_time()
    records = client.run_point(base_url, "m", point, prompts, 1, stagger_s=stagger_s, timeout_s=120)
    cpu_s = time.process_time() - started_s
    with urllib.request.urlopen(base_url + "/log") as answer:
        log = {entry["body"]["prompt"][1]: entry for entry in json.load(answer)[-len(prompts) :]}
    measured = [record for record in records if record.get("phase") == "measured"]
    ttft_errors_s, tpot_errors = [], []
    for record in measured:
        entry = log[record["request"]]
        written_s = entry["write_times_s"]
        ttft_errors_s.append(definitions.ttft_s(record) - (written_s[0] - entry["received_s"]))
        tpot_s = (written_s[TOKENS - 1] - written_s[0]) / (TOKENS - 1)
        tpot_errors.append(definitions.tpot_s(record) / tpot_s - 1)
    return {
        "streams": streams,
        "sends": "spread" if stagger_s else "at once",
        "ttft_error_ms_mean": 1000 * statistics.fmean(ttft_errors_s),
        "ttft_error_ms_p99": 1000 * statistics.quantiles(ttft_errors_s, n=100, method="inclusive")[98],
        "tpot_error_percent_mean": 100 * statistics.fmean(tpot_errors),
        "cpu_us_per_token": 1e6 * cpu_s / (len(prompts) * TOKENS),
        "lag_ms_max": 1000 * records[-1]["event_loop_lag_s"][1],
    }


def main(levels):
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([script()], file)
        file.flush()
        command = [sys.executable, REPLAY_SERVER, file.name]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            os.sched_setaffinity(server.pid, cpus[-1:])
            os.sched_setaffinity(0, cpus[:1])
            base_url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            for streams in levels:
                for stagger_s in (DURATION_S, 0.0):
                    row = measure(base_url, streams, stagger_s)
                    row["load_average"] = os.getloadavg()[0]
                    print(json.dumps(row, default=str), flush=True)
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [16, 128, 512])
