"""kvlab's timed loop against a bare loop by hand (budget: 1 % of TPOT) and against Transformers' own generate().

All three decode the same prompt with the same model and cache, and must choose the same tokens before they race. A
block runs them in random order and then in that order backwards, so that drift falls on all alike; a block's ratio is
that of geometric means, and the interval of the blocks' median is by order statistics, which a noisy block cannot move.
    python benchmarks/harness_overhead.py --blocks 60 --context-length 16 --output-tokens 9
"""

import argparse
import gc
import math
import random
import time

import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvlab import models, weights
from kvlab.analyse import summary
from kvlab.measure import decoding, timing
from kvlab.prompts import token_ids

BUDGET = 0.01


def bare(model: torch.nn.Module, prompt: list[int], output_tokens: int) -> tuple[float, list[int]]:
    """TPOT and tokens of a cached greedy loop that keeps nothing but the first and the last time stamp."""
    chosen = []
    with torch.inference_mode():
        cache, ids = DynamicCache(), torch.tensor([prompt])  # (1, prompt_tokens)
        for step in range(output_tokens):
            answer = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = answer.logits[:, -1].argmax(dim=-1, keepdim=True)  # (1, 1)
            chosen.append(int(ids))
            if step == 0:
                first_s = time.perf_counter()
        return (time.perf_counter() - first_s) / (output_tokens - 1), chosen


def kvlab(model: torch.nn.Module, prompt: list[int], output_tokens: int) -> tuple[float, list[int]]:
    """TPOT and tokens of the same work by kvlab's loop, from its own record."""
    made = decoding.generate(model, prompt, output_tokens, True, timing.synchronizer("cpu"))
    return (made.arrival_times_s[-1] - made.arrival_times_s[0]) / (output_tokens - 1), made.token_ids


class Arrivals(BaseStreamer):
    """Notes when generate() hands over each token; what it hands over first is the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: torch.nn.Module, prompt: list[int], output_tokens: int) -> tuple[float, list[int]]:
    """TPOT and tokens of Transformers' generate(), greedy, no token ending it early."""
    ids, seen = torch.tensor([prompt]), Arrivals()
    asked = {"max_new_tokens": output_tokens, "do_sample": False, "pad_token_id": 0}
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=seen, **asked)
    times_s = seen.times_s[1:]
    return (times_s[-1] - times_s[0]) / (output_tokens - 1), answer[0, len(prompt) :].tolist()


LOOPS = (kvlab, bare, generate)


def block(model: torch.nn.Module, prompt: list[int], output_tokens: int, rng: random.Random) -> dict[str, float]:
    """Geometric mean of each loop's TPOT in seconds over one block, by the loop's name."""
    order = rng.sample(LOOPS, len(LOOPS))
    logs: dict[str, float] = dict.fromkeys((loop.__name__ for loop in LOOPS), 0.0)
    for loop in order + order[::-1]:
        logs[loop.__name__] += math.log(loop(model, prompt, output_tokens)[0]) / 2
    return {name: math.exp(value) for name, value in logs.items()}


def compare(blocks: list[dict[str, float]], one: str, other: str) -> summary.Estimate:
    """Print and return by how much one loop's TPOT exceeds the other's."""
    found = summary.interval([each[one] / each[other] for each in blocks])
    added_s = summary.interval([each[other] for each in blocks]).median * (found.median - 1)
    print(
        f"{one} over {other}: {found.median - 1:+.2%}, 95 % interval {found.low - 1:+.2%} to {found.high - 1:+.2%}, "
        f"n = {found.n} blocks; {added_s * 1e6:+.0f} us a token"
    )
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--context-length", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    torch.set_num_threads(asked.threads)
    model = weights.load(models.resolve(asked.model), "float32", "cpu", "sdpa")
    model.generation_config.eos_token_id = None  # no token ends generate() early
    prompt = token_ids(asked.context_length, 0, 0, model.config.vocab_size)
    tokens = [loop(model, prompt, asked.output_tokens)[1] for loop in LOOPS]  # also the warm-up
    if not tokens[0] == tokens[1] == tokens[2]:
        raise SystemExit(f"the loops choose different tokens: {tokens}")
    gc.collect()
    gc.freeze()
    rng = random.Random(0)
    blocks = [block(model, prompt, asked.output_tokens, rng) for _ in range(asked.blocks)]
    overhead = compare(blocks, "kvlab", "bare")
    print(f"upper bound within {BUDGET:.0%}: {'yes' if overhead.high - 1 <= BUDGET else 'no'}")
    compare(blocks, "kvlab", "generate")
    compare(blocks, "generate", "bare")
    print(
        "What generate() adds to a bare loop is its own work at every token: inputs, positions and masks prepared, "
        "logits processors and stopping criteria asked. kvlab's loop has none of it."
    )


if __name__ == "__main__":
    main()
