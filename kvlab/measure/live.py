"""A generation that is watched while it runs: its times leave out what the watcher took, and none of it is recorded."""

import time
from collections.abc import Callable

import torch

from kvlab.measure import decoding, timing


def watch(
    model: torch.nn.Module,
    prompt_ids: list[int],
    output_tokens: int,
    use_cache: bool,
    on_token: Callable[[float], None],
) -> None:
    """Generate greedily and call `on_token` with each token's arrival in seconds since the launch of the prefill.

    The clock stands still while `on_token` works. What it raises ends the generation.
    """
    wait, clock = timing.synchronizer(next(model.parameters()).device), {"start_s": None}

    def at_each_reading() -> None:  # the loop calls it before it starts its clock and before each stamp
        wait()
        now_s = time.perf_counter()
        if clock["start_s"] is None:
            clock["start_s"] = now_s
            return
        on_token(now_s - clock["start_s"])
        clock["start_s"] += time.perf_counter() - now_s

    decoding.generate(model, prompt_ids, output_tokens, use_cache, at_each_reading)
