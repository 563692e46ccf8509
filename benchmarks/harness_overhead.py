"""kvlab's timed loop against a bare loop by hand (budget: 1 % of TPOT), and Transformers' own generate() against it.

The two run in step in one thread: when a loop holds a token it calls `HandOver`, which reads its clock, lets the bare
loop take as many steps, each timed by the same clock, and reads the clock again on the way back. So every step has
its partner milliseconds away, at the same cache length and in random order, and neither loop's time holds the
other's. A loop's time is all that it does from one token to the next. Both work on the same weights; the bare loop
calls a copy of the modules around them, without the hook that kvlab sets. One generation is a block; its ratio is
that of the sums over its steps, and the interval of the blocks' median is by order statistics: a noisy block cannot
move it, and steps that depend on each other stay in one block. The bare loop against itself shows what the method
adds: nothing, or it is wrong.
    python benchmarks/harness_overhead.py --blocks 100 --context-length 16 --output-tokens 17
"""

import argparse
import copy
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvlab import models, weights
from kvlab.analyse import summary
from kvlab.measure import decoding
from kvlab.prompts import token_ids

BUDGET = 0.01
OTHERS = 6  # a block of each other loop comes with this many of kvlab's


def steps(model: torch.nn.Module, prompt: list[int]) -> Iterator[int]:
    """A bare cached greedy loop: token after token."""
    cache, ids = DynamicCache(), torch.tensor([prompt])  # (1, prompt_tokens)
    while True:
        answer = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = answer.logits[:, -1].argmax(dim=-1, keepdim=True)  # (1, 1)
        yield int(ids)


class HandOver(BaseStreamer):
    """Called before the prefill and after each token of the loop that is measured; runs the bare loop's partners."""

    def __init__(self, partner: Iterator[int], output_tokens: int, rng: random.Random) -> None:
        goes_second = [True, *rng.choices([True, False], k=output_tokens - 1)]  # partner i, the prefill's being 0
        ahead = [not second for second in goes_second[1:]] + [False]
        self._turns = iter(map(sum, zip(goes_second, ahead)))  # steps of the partner after each step of the loop
        self._partner, self._resumed_s = partner, None
        self.loop_s, self.partner_s, self.partner_tokens = [], [], []

    def __call__(self, *_: object) -> None:
        now_s = time.perf_counter()
        if self._resumed_s is not None:
            self.loop_s.append(now_s - self._resumed_s)
            with torch.inference_mode():
                for _ in range(next(self._turns)):
                    start_s = time.perf_counter()
                    self.partner_tokens.append(next(self._partner))
                    self.partner_s.append(time.perf_counter() - start_s)
        self._resumed_s = time.perf_counter()

    put = __call__  # what generate() calls, with the prompt first

    def end(self) -> None:
        pass

    def ratios(self) -> tuple[float, float]:
        """TPOT of the loop over that of its partner, and the median of its steps' own ratios; without the prefills."""
        pairs = zip(self.loop_s[1:], self.partner_s[1:])
        return sum(self.loop_s[1:]) / sum(self.partner_s[1:]), statistics.median(one / other for one, other in pairs)


def kvlab(model: torch.nn.Module, prompt: list[int], output_tokens: int, hand_over: HandOver) -> list[int]:
    """kvlab's whole loop; it waits for its device before each reading of its clock, and here hands over instead."""
    return decoding.generate(model, prompt, output_tokens, True, hand_over).token_ids


def bare(model: torch.nn.Module, prompt: list[int], output_tokens: int, hand_over: HandOver) -> list[int]:
    """The bare loop in the place of a measured one."""
    hand_over()
    with torch.inference_mode():
        return [(token, hand_over())[0] for token in itertools.islice(steps(model, prompt), output_tokens)]


def generate(model: torch.nn.Module, prompt: list[int], output_tokens: int, hand_over: HandOver) -> list[int]:
    """Transformers' generate(), greedy, no token ending it early."""
    ids = torch.tensor([prompt])
    asked = {"max_new_tokens": output_tokens, "do_sample": False, "pad_token_id": 0}
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=hand_over, **asked)
    return answer[0, len(prompt) :].tolist()


def block(
    loop: Callable, model: torch.nn.Module, twin: torch.nn.Module, asked, rng: random.Random
) -> tuple[float, float]:
    """Run one generation beside the bare loop's; SystemExit unless both choose the same tokens."""
    prompt = token_ids(asked.context_length, 0, 0, model.config.vocab_size)
    hand_over = HandOver(steps(twin, prompt), asked.output_tokens, rng)
    tokens = loop(model, prompt, asked.output_tokens, hand_over)
    if tokens != hand_over.partner_tokens:
        raise SystemExit(f"the loops choose different tokens: {tokens}, {hand_over.partner_tokens}")
    return hand_over.ratios()


def told(name: str, ratios: list[tuple[float, float]]) -> summary.Estimate:
    """Print by how much a loop's TPOT exceeds the bare loop's, and its middle step the partner's; return the first."""
    tpot, step = (summary.interval(values) for values in zip(*ratios))
    for what, found in (("TPOT", tpot), ("middle step", step)):
        print(
            f"{name} over bare, {what}: {found.median - 1:+.2%}, 95 % interval {found.low - 1:+.2%} to "
            f"{found.high - 1:+.2%}, n = {found.n} blocks"
        )
    return tpot


def same_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the modules around the very same parameters and buffers."""
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--context-length", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=17)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    torch.set_num_threads(asked.threads)
    model = weights.load(models.resolve(asked.model), "float32", "cpu", "sdpa")
    model.generation_config.eos_token_id = None  # no token ends generate() early
    twin, rng, loops = same_weights(model), random.Random(0), (kvlab, bare, generate)
    for loop in loops:  # the warm-up
        block(loop, model, twin, asked, rng)
    gc.collect()
    gc.freeze()
    ratios: dict[Callable, list[tuple[float, float]]] = {loop: [] for loop in loops}
    for number in range(asked.blocks):
        for loop in loops if number % OTHERS == 0 else (kvlab,):
            ratios[loop].append(block(loop, model, twin, asked, rng))
    overhead = told("kvlab", ratios[kvlab])
    print(f"upper bound within {BUDGET:.0%}: {'yes' if overhead.high - 1 <= BUDGET else 'no'}")
    told("bare (a check of the method)", ratios[bare])
    told("generate", ratios[generate])
    print(
        "What generate() adds to a bare loop is its own work at every token: inputs, positions and masks prepared, "
        "logits processors and stopping criteria asked. kvlab's loop has none of it."
    )


if __name__ == "__main__":
    main()
