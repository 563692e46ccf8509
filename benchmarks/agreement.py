"""Our client and `vllm bench serve` on one live vLLM server: do they say the same?

`python benchmarks/agreement.py [ROUNDS]`: the two take turns with the same load, each first in every second round;
each line is one run's median TTFT and TPOT, with the prompt's tokens and mean TTFT that the server counted meanwhile.
They agree where the median over the runs of each lies within the spread of the other's runs; the ratio of each round's
two runs is printed with its interval.
"""

import json
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path

import peers

from kvlab import models, prompts, weights
from kvlab.analyse import definitions, summary
from kvlab.measure import client, metrics, server

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


def counters(base_url):
    with urllib.request.urlopen(f"{base_url}/metrics") as answer:
        return metrics.parse(answer.read().decode())


def show(number, name, ttft_s, tpot_s, rise):
    requests = rise["ttft_count"]
    told = {"prompt_tokens": rise["prompt_tokens"] / requests, "mean_ttft_s": rise["ttft_sum_s"] / requests}
    line = {"round": number, "client": name, "ttft_s": ttft_s, "tpot_s": tpot_s, "server": told}
    print(json.dumps(line), flush=True)


def agree(one, other):
    return min(other) <= statistics.median(one) <= max(other) and min(one) <= statistics.median(other) <= max(one)


def main(rounds):
    source = models.resolve(models.DEFAULT)
    folder, runs = weights.served_folder(source, "float32"), {"kvlab": [], "vllm": []}
    with tempfile.TemporaryDirectory() as logs, server.VllmServer(
        folder, "m", 512, "float32", True, 2**29, threads=1, log_path=Path(logs) / "log", report=print
    ) as running:
        for number in range(rounds):
            measure = {
                "kvlab": lambda number=number: ours(running.base_url, number, models.outline(source).vocab_size),
                "vllm": lambda: theirs(running.base_url, folder),
            }
            for name in sorted(measure, reverse=number % 2 == 1):  # each goes first in every second round
                before = counters(running.base_url)
                runs[name].append(measure[name]())
                rise = metrics.deltas(before, counters(running.base_url))
                show(number, name, *runs[name][-1], rise)
    for index, value in enumerate(("ttft_s", "tpot_s")):
        one, other = ([run[index] for run in found] for found in runs.values())
        medians = {name: statistics.median(run[index] for run in found) for name, found in runs.items()}
        ratio = summary.interval([ours / theirs for ours, theirs in zip(one, other, strict=True)])
        paired = [round(each, 3) for each in (ratio.median, ratio.low, ratio.high)]
        print(json.dumps({"value": value, "medians": medians, "agree": agree(one, other), "ratio by round": paired}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
