"""Our client and `vllm bench serve` on one live vLLM server: do they say the same?

`python benchmarks/agreement.py [ROUNDS]`: the two take turns with the same load; each line is one run's median
TTFT and TPOT. They agree where the median over the runs of each lies within the spread of the other's runs.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

import peers

from kvlab import models, prompts, weights
from kvlab.analyse import definitions
from kvlab.measure import client, server

STREAMS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 16, 128, 16


def ours(base_url, round_number, vocab_size):
    """(median TTFT, median TPOT) in seconds."""
    point = {"loop": "closed", "concurrency": STREAMS, "output_tokens": OUTPUT_TOKENS}
    ids = [prompts.token_ids(PROMPT_TOKENS, round_number, i, vocab_size) for i in range(STREAMS + REQUESTS)]
    token = server.TOKEN_VARIABLE
    records = client.run_point(base_url, "m", point, ids, round_number, stagger_s=0.0, token_variable=token)
    measured = [record for record in records if record.get("phase") == "measured"]
    if failed := [record["reason"] for record in measured if record["status"] != "ok"]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}, {measured[0]['detail']}")
    return tuple(statistics.median(map(of, measured)) for of in (definitions.ttft_s, definitions.tpot_s))


def theirs(base_url, folder):
    load = peers.Load(base_url, "m", folder, STREAMS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS)
    with tempfile.TemporaryDirectory() as results:
        said = peers.run("vllm", load, Path(results))
    return statistics.median(said.ttft_s), statistics.median(said.tpot_s)


def agree(one, other):
    return min(other) <= statistics.median(one) <= max(other) and min(one) <= statistics.median(other) <= max(one)


def main(rounds):
    source = models.resolve(models.DEFAULT)
    folder, runs = weights.served_folder(source, "float32"), {"kvlab": [], "vllm": []}
    with tempfile.TemporaryDirectory() as logs, server.VllmServer(
        folder, "m", 512, "float32", True, 2**29, threads=1, log_path=Path(logs) / "log", report=print
    ) as running:
        for number in range(rounds):
            runs["kvlab"].append(ours(running.base_url, number, models.outline(source).vocab_size))
            runs["vllm"].append(theirs(running.base_url, folder))
            for name, found in runs.items():
                print(json.dumps({"round": number, "client": name, "ttft_s": found[-1][0], "tpot_s": found[-1][1]}))
    for index, value in enumerate(("ttft_s", "tpot_s")):
        one, other = ([run[index] for run in found] for found in runs.values())
        medians = {name: statistics.median(run[index] for run in found) for name, found in runs.items()}
        print(json.dumps({"value": value, "medians": medians, "agree": agree(one, other)}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
