"""How far our client's TTFT and TPOT lie from a server's own log, and what a token costs it.

`python benchmarks/client_fidelity.py [STREAMS...] [--peers vllm aiperf guidellm]`: a server that writes its
first token after 50 ms and 63 more 20 ms apart, four requests per stream; server and client on a CPU each. Sends
are spread over one request's duration, then all at once. A yardstick of some lines on aiohttp and the peers do the
same in one go, ours first. Needs a quiet machine: the load average is printed beside the numbers.
"""

import argparse
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

import peers
import sketch

from kvlab import models, weights
from kvlab.analyse import definitions
from kvlab.measure import client

REPLAY_SERVER = Path(__file__).parents[1] / "tests" / "replay_server.py"
FIRST_MS, STEP_MS, TOKENS = 50, 20, 64
DURATION_S = (FIRST_MS + STEP_MS * (TOKENS - 1)) / 1000
REQUESTS_PER_STREAM = 4
ENOUGH_TOKENS = 30_000  # below, a peer's CPU time is that of its start


def event(index):
    choice = {"index": 0, "text": " token", "finish_reason": "length" if index == TOKENS - 1 else None}
    usage = {"prompt_tokens": 8, "completion_tokens": index + 1, "total_tokens": index + 9}
    payload = {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage}
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def script():
    writes = [(FIRST_MS + STEP_MS * i, event(i)) for i in range(TOKENS)]
    usage = {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": TOKENS, "total_tokens": TOKENS + 8}}
    writes.append((writes[-1][0], b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"))
    writes = [(at_ms, base64.b64encode(content).decode()) for at_ms, content in writes]
    headers = {"content-type": "text/event-stream"}
    return {"status": 200, "headers": headers, "writes": writes, "close": "clean"}


def measure(name, send, base_url, streams, spread_s):
    """One row: errors in milliseconds and percent, CPU microseconds per token; `send` is one of the two below."""
    prompts = [[0, number] for number in range(streams * (1 + REQUESTS_PER_STREAM))]
    started_s = time.process_time()
    said = send(base_url, prompts, streams, spread_s)
    cpu_s = time.process_time() - started_s
    with urllib.request.urlopen(base_url + "/log") as answer:
        log = {entry["body"]["prompt"][1]: entry for entry in json.load(answer)[-len(prompts) :]}
    ttft_errors_s, tpot_errors = [], []
    for number, (ttft_s, tpot_s) in said.items():
        written_s = log[number]["write_times_s"]
        ttft_errors_s.append(ttft_s - (written_s[0] - log[number]["received_s"]))
        tpot_errors.append(tpot_s * (TOKENS - 1) / (written_s[TOKENS - 1] - written_s[0]) - 1)
    return {
        "client": name, "streams": streams, "sends": "spread" if spread_s else "at once",
        "ttft_error_ms_mean": 1000 * statistics.fmean(ttft_errors_s),
        "ttft_error_ms_p99": 1000 * statistics.quantiles(ttft_errors_s, n=100, method="inclusive")[98],
        "tpot_error_percent_mean": 100 * statistics.fmean(tpot_errors),
        "cpu_us_per_token": 1e6 * cpu_s / (len(prompts) * TOKENS),
    }  # fmt: skip


def ours(base_url, prompts, streams, spread_s):
    """{number of the prompt: (TTFT, TPOT)} of the measured requests; the warm-up comes before them."""
    point = {"loop": "closed", "concurrency": streams, "output_tokens": TOKENS}
    records = client.run_point(base_url, "m", point, prompts, 1, stagger_s=spread_s, timeout_s=120)
    measured = [record for record in records if record.get("phase") == "measured"]
    return {each["request"]: (definitions.ttft_s(each), definitions.tpot_s(each)) for each in measured}


def plainest(base_url, prompts, streams, spread_s):
    """The same of the yardstick, whose warm-up are the first requests of each stream as well."""
    warm, measured = prompts[:streams], prompts[streams:]
    sketch.run(base_url, warm, streams, 0.0, TOKENS)
    said = sketch.run(base_url, measured, streams, spread_s, TOKENS)
    return {prompt[1]: each for prompt, each in zip(measured, said, strict=True)}


def measure_peer(name, base_url, streams, spread_s, tokenizer, folder):
    """The same row for a peer, as far as it tells: the server's answers are all alike, so their mean is the truth.

    A peer does not say which request was which, so p99 is against that mean, and it carries its own start: the CPU
    time of a run of a single request is taken off.
    """

    def load(streams, requests, spread_s):
        return peers.Load(base_url, "m", tokenizer, streams, requests, 8, TOKENS, spread_s)

    idle_s = peers.run(name, load(1, 1, 0.0), folder / "idle").cpu_s
    requests = streams * REQUESTS_PER_STREAM
    tokens = requests * TOKENS
    said = peers.run(name, load(streams, requests, spread_s), folder / "run")
    with urllib.request.urlopen(base_url + "/log") as answer:
        log = json.load(answer)[-requests:]
    true_ttft_s = statistics.fmean(entry["write_times_s"][0] - entry["received_s"] for entry in log)
    spans_s = [entry["write_times_s"][TOKENS - 1] - entry["write_times_s"][0] for entry in log]
    errors_s = [ttft_s - true_ttft_s for ttft_s in said.ttft_s]
    return {
        "client": name, "streams": streams, "sends": "spread" if spread_s else "at once",
        "ttft_error_ms_mean": 1000 * statistics.fmean(errors_s),
        "ttft_error_ms_p99": 1000 * statistics.quantiles(errors_s, n=100, method="inclusive")[98],
        "tpot_error_percent_mean": 100 * (statistics.fmean(said.tpot_s) * (TOKENS - 1) / statistics.fmean(spans_s) - 1),
        "cpu_us_per_token": 1e6 * (said.cpu_s - idle_s) / tokens if tokens >= ENOUGH_TOKENS else None,
    }  # fmt: skip


def main(levels, names):
    tokenizer = weights.served_folder(models.resolve(models.DEFAULT), "float32") if names else None
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([script()], file)
        file.flush()
        command = [sys.executable, REPLAY_SERVER, file.name, "uvloop"]  # else the server is what is slow
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            os.sched_setaffinity(server.pid, cpus[-1:])
            os.sched_setaffinity(0, cpus[:1])
            base_url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            for streams in levels:
                for spread_s in (DURATION_S, 0.0):
                    for name, send in (("kvlab", ours), ("aiohttp sketch", plainest)):
                        show(measure(name, send, base_url, streams, spread_s))
                    for name in names:
                        with tempfile.TemporaryDirectory() as folder:
                            try:
                                show(measure_peer(name, base_url, streams, spread_s, tokenizer, Path(folder)))
                            except (RuntimeError, subprocess.CalledProcessError) as error:  # the others go on
                                show({"client": name, "streams": streams, "failed": str(error)[-300:]})
        finally:
            server.kill()
            server.wait()


def show(row):
    print(json.dumps(row | {"load_average": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", nargs="+", choices=peers.NAMES, default=[])
    parser.add_argument("streams", nargs="*", type=int)
    options = parser.parse_args()
    main(options.streams or [16, 128, 512], options.peers)
