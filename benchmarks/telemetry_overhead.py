"""How much sampling beside it adds to a token's time, against the same loop without it: budget 0.5 % of TPOT.

One generation is a block of four neighbouring windows of a few hundred milliseconds, sampled and not in the order ABBA
or BAAB by chance, so that drift falls on both alike. The sampler is switched where the loop waits for its device, and
the clock stands still meanwhile. A window that is not sampled has the sampler's thread as well, asleep, so that the
switch itself is the same. A block's ratio is that of the windows' times, and the interval of the blocks' median is by
order statistics. `--times-as-often 20` samples that much more than a measurement does and tells the effect of the usual
rate as that part of what it finds: samples cost what they cost, and a large effect is seen sooner than a small one.
    python benchmarks/telemetry_overhead.py --blocks 150 --context-length 64 --window-tokens 6
"""

import argparse
import gc
import random
import time

import torch

from kvlab import models, weights
from kvlab.analyse import summary
from kvlab.measure import decoding, sampling, timing
from kvlab.prompts import token_ids

BUDGET = 0.005
NEVER_S = 1e6
WINDOWS = 4


class Switch:
    """Called before the prefill and after each token: times the steps, and switches the sampler between windows."""

    def __init__(self, device: torch.device, order: list[bool], window_tokens: int, interval_s: float) -> None:
        self._wait, self._intervals = timing.synchronizer(device), [interval_s if on else NEVER_S for on in order]
        self._window_tokens, self._sampler, self._resumed_s = window_tokens, None, 0.0
        self.times_s: list[float] = []  # of the wait for the prefill, of the prefill, then of each step

    def __call__(self) -> None:
        self._wait()
        self.times_s.append(time.perf_counter() - self._resumed_s)
        window, token = divmod(len(self.times_s) - 2, self._window_tokens)
        if token == 0 and window >= 0:
            self._change(window)
        self._resumed_s = time.perf_counter()

    def _change(self, window: int) -> None:
        if self._sampler:
            self._sampler.__exit__()
        if window < len(self._intervals):
            self._sampler = sampling.Telemetry(interval_s=self._intervals[window]).__enter__()


def block(model: torch.nn.Module, prompt: list[int], asked: argparse.Namespace, rng: random.Random) -> float:
    """Run one generation; return TPOT sampled over TPOT not sampled, at the usual rate."""
    first = rng.random() < 0.5
    order = [first, not first, not first, first]
    interval_s = sampling.INTERVAL_S / asked.times_as_often
    switch = Switch(next(model.parameters()).device, order, asked.window_tokens, interval_s)
    decoding.generate(model, prompt, 1 + WINDOWS * asked.window_tokens, True, switch)
    spent_s = {True: 0.0, False: 0.0}
    for step, time_s in enumerate(switch.times_s[2:]):
        spent_s[order[step // asked.window_tokens]] += time_s
    return 1 + (spent_s[True] / spent_s[False] - 1) / asked.times_as_often


def sample_cost_s(samples: int = 500) -> float:
    """Time one sample by itself: what it costs the thread that takes it."""
    sampled = sampling.Telemetry()
    watch = timing.Stopwatch(lambda: None)
    watch.start()
    for _ in range(samples):
        sampled.sample()
    watch.stamp()
    return watch.times_s[0] / samples


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--blocks", type=int, default=150)
    parser.add_argument("--context-length", type=int, default=64)
    parser.add_argument("--window-tokens", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times-as-often", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Print the sampler's effect with its 95 % interval, and whether its upper bound keeps the budget."""
    asked = arguments()
    torch.set_num_threads(asked.threads)
    model = weights.load(models.resolve(asked.model), asked.dtype, asked.device, "sdpa")
    prompt = token_ids(asked.context_length, 0, 0, model.config.vocab_size)
    rng = random.Random(0)
    block(model, prompt, asked, rng)  # the warm-up
    gc.collect()
    gc.freeze()
    found = summary.interval([block(model, prompt, asked, rng) for _ in range(asked.blocks)])
    cost_s = sample_cost_s()
    print(f"TPOT sampled over not sampled: {found.median - 1:+.2%}, n = {found.n} blocks")
    print(f"95 % interval: {found.low - 1:+.2%} to {found.high - 1:+.2%}")
    print(
        f"one sample takes {cost_s * 1e6:.0f} us, {cost_s / sampling.INTERVAL_S:.2%} of the usual "
        f"{sampling.INTERVAL_S * 1e3:.0f} ms between two; here they were {asked.times_as_often} times as frequent"
    )
    print(f"upper bound within {BUDGET:.1%}: {'yes' if found.high - 1 <= BUDGET else 'no'}")


if __name__ == "__main__":
    main()
