"""How much sampling beside it adds to a token's time, against the same loop without it: budget 0.5 % of TPOT.

ABBA blocks in one process, so that drift falls on both alike; Student's t on the blocks' log ratios.
    python benchmarks/telemetry_overhead.py --blocks 20 --context-length 128 --output-tokens 32
"""

import argparse
import gc
import math
import statistics
from contextlib import nullcontext

import torch
from scipy import stats

from kvlab import models, weights
from kvlab.measure import decoding, sampling, timing
from kvlab.prompts import token_ids

BUDGET = 0.005


def tpot_s(model: torch.nn.Module, prompt: list[int], output_tokens: int, sampled: bool) -> float:
    """Time one cached generation by kvlab's loop, with the sampler running beside it or without."""
    wait = timing.synchronizer(next(model.parameters()).device)
    with sampling.Telemetry() if sampled else nullcontext():
        times_s = decoding.generate(model, prompt, output_tokens, True, wait).arrival_times_s
    return (times_s[-1] - times_s[0]) / (output_tokens - 1)


def log_ratio(model: torch.nn.Module, prompt: list[int], output_tokens: int, sampled_first: bool) -> float:
    """Run one ABBA block (or BAAB) and return log(sampled / not sampled)."""
    order = [sampled_first, not sampled_first, not sampled_first, sampled_first]
    runs = [(sampled, math.log(tpot_s(model, prompt, output_tokens, sampled))) for sampled in order]
    return sum(value if sampled else -value for sampled, value in runs) / 2


def sample_cost_s(samples: int = 500) -> float:
    """Time one sample by itself: what it costs the thread that takes it."""
    sampled = sampling.Telemetry()
    watch = timing.Stopwatch(lambda: None)
    watch.start()
    for _ in range(samples):
        sampled.sample()
    watch.stamp()
    return watch.times_s[0] / samples


def main() -> None:
    """Print the sampler's effect with its 95 % interval, and whether its upper bound keeps the budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--context-length", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    asked = parser.parse_args()
    model = weights.load(models.resolve(asked.model), asked.dtype, asked.device, "sdpa")
    prompt = token_ids(asked.context_length, 0, 0, model.config.vocab_size)
    for sampled in (False, True):
        tpot_s(model, prompt, asked.output_tokens, sampled)
    gc.collect()
    gc.freeze()
    logs = [log_ratio(model, prompt, asked.output_tokens, block % 2 == 0) for block in range(asked.blocks)]
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.expm1(statistics.mean(logs) + side * half) for side in (-1, 0, 1))
    cost_s = sample_cost_s()
    print(f"TPOT sampled over not sampled: {middle:+.2%}, n = {len(logs)}")
    print(f"95 % interval: {low:+.2%} to {high:+.2%}")
    print(f"one sample takes {cost_s * 1e6:.0f} us, {cost_s / sampling.INTERVAL_S:.2%} of the interval between two")
    print(f"upper bound within {BUDGET:.1%}: {'yes' if high <= BUDGET else 'no'}")


if __name__ == "__main__":
    main()
