"""How much kvlab's timed loop adds to a token, against a bare loop by hand on the same model: budget 1 %.

ABBA blocks in one process, so that drift falls on both alike; Student's t on the blocks' log ratios.
    python benchmarks/harness_overhead.py --blocks 20 --context-length 128 --output-tokens 16
"""

import argparse
import gc
import math
import statistics
import time

import torch
from scipy import stats
from transformers import DynamicCache

from kvlab import models, weights
from kvlab.measure import decoding, timing
from kvlab.prompts import token_ids

BUDGET = 0.01


def bare_tpot_s(model: torch.nn.Module, prompt: list[int], output_tokens: int) -> float:
    """Time a cached greedy loop that keeps nothing but the first and the last time stamp."""
    with torch.inference_mode():
        cache, ids = DynamicCache(), torch.tensor([prompt])  # (1, prompt_tokens)
        for step in range(output_tokens):
            answer = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = answer.logits[:, -1].argmax(dim=-1, keepdim=True)  # (1, 1)
            int(ids)
            if step == 0:
                first_s = time.perf_counter()
        return (time.perf_counter() - first_s) / (output_tokens - 1)


def kvlab_tpot_s(model: torch.nn.Module, prompt: list[int], output_tokens: int) -> float:
    """Time the same work by kvlab's loop, from its own record."""
    wait = timing.synchronizer("cpu")
    times_s = decoding.generate(model, prompt, output_tokens, True, wait).arrival_times_s
    return (times_s[-1] - times_s[0]) / (output_tokens - 1)


def log_ratio(model: torch.nn.Module, prompt: list[int], output_tokens: int, kvlab_first: bool) -> float:
    """Run one ABBA block (or BAAB) and return log(kvlab / bare)."""
    order = [kvlab_tpot_s, bare_tpot_s, bare_tpot_s, kvlab_tpot_s]
    if not kvlab_first:
        order = [bare_tpot_s, kvlab_tpot_s, kvlab_tpot_s, bare_tpot_s]
    runs = [(loop, math.log(loop(model, prompt, output_tokens))) for loop in order]
    return sum(value if loop is kvlab_tpot_s else -value for loop, value in runs) / 2


def main() -> None:
    """Print the overhead's median and 95 % interval, and whether its upper bound keeps the budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--context-length", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=16)
    asked = parser.parse_args()
    model = weights.load(models.resolve(asked.model), "float32", "cpu", "sdpa")
    prompt = token_ids(asked.context_length, 0, 0, model.config.vocab_size)
    for loop in (bare_tpot_s, kvlab_tpot_s):
        loop(model, prompt, asked.output_tokens)
    gc.collect()
    gc.freeze()
    blocks = range(asked.blocks)
    logs = [log_ratio(model, prompt, asked.output_tokens, block % 2 == 0) for block in blocks]
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.expm1(statistics.mean(logs) + side * half) for side in (-1, 0, 1))
    print(f"kvlab's loop over a bare loop, TPOT: {middle:+.2%}, n = {len(logs)}")
    print(f"95 % interval: {low:+.2%} to {high:+.2%}")
    print(f"upper bound within {BUDGET:.0%}: {'yes' if high <= BUDGET else 'no'}")


if __name__ == "__main__":
    main()
