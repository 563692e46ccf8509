"""Made-up tidy frames for the article's tests: plausible in shape, measured by nobody."""

import numpy as np
import pandas as pd

CONTEXTS = {128: 16, 256: 16, 512: 16, 1024: 4, 2048: 4}  # context length: output tokens
KV_BYTES_PER_TOKEN = 46_080
SOURCE = "results/fake/s1b.jsonl, environment 0123abcd"


def kv_cache_bytes(tokens, batch=1):
    return tokens * batch * KV_BYTES_PER_TOKEN


def noise(rng):
    return float(rng.lognormal(0, 0.03))


def generations(repetitions=6, kernels=("eager", "sdpa"), seed=1):
    """S1b's frame; the longest eager point without cache runs out of memory once."""
    rng, rows = np.random.default_rng(seed), []
    for attention in kernels:
        for context, output in CONTEXTS.items():
            for repetition in range(repetitions):
                ttft = 0.9 * context / 1024 * noise(rng) * (1 + context / 4096 * (attention == "eager"))
                for use_cache in (True, False):
                    tpot = (0.030 + 1.6e-5 * context) * noise(rng) if use_cache else ttft * 1.02 * noise(rng)
                    lost = context == 2048 and attention == "eager" and not use_cache and repetition == 0
                    rows.append(
                        {
                            "attention": attention,
                            "context_length": context,
                            "output_tokens": output,
                            "use_cache": use_cache,
                            "compiled": False,
                            "warmup_s": None,
                            "repetition": repetition,
                            "pair": f"{attention}-{context}-{repetition}",
                            "control": False,
                            "status": "out_of_memory" if lost else "ok",
                            "reason": "no memory left" if lost else None,
                            "batch_size": 1,
                            "ttft_s": np.nan if lost else ttft * noise(rng),
                            "tpot_s": np.nan if lost else tpot,
                            "e2e_s": np.nan if lost else ttft + tpot * (output - 1),
                            "kv_cache_bytes": KV_BYTES_PER_TOKEN * (context + output - 1)
                            if use_cache
                            else np.nan,
                            "peak_memory_bytes": np.nan,
                            "environment": "0123abcd",
                        }
                    )
    return pd.DataFrame(rows)


def pairs(**options):
    """Paired ratios of generations(); the pair that lost an arm is refused."""
    frame, keys = (
        generations(**options),
        ["attention", "context_length", "output_tokens", "repetition", "control", "pair"],
    )
    arms = frame.pivot(index=keys, columns="use_cache", values=["ttft_s", "tpot_s", "e2e_s"])
    ratios = pd.DataFrame(
        {
            name: arms[value][False] / arms[value][True]
            for name, value in (
                ("ttft_ratio", "ttft_s"),
                ("tpot_speedup", "tpot_s"),
                ("total_speedup", "e2e_s"),
            )
        }
    ).reset_index()
    return ratios.assign(refusal=np.where(ratios["tpot_speedup"].isna(), "arm_missing", None))


def steps(repetitions=3, context=512, output=128, seed=2):
    """One long generation per arm, kernel and repetition."""
    rng, rows = np.random.default_rng(seed), []
    for attention in ("eager", "sdpa"):
        for use_cache in (True, False):
            for repetition in range(repetitions):
                for step in range(1, output):
                    position = context + step
                    step_s = (
                        0.033 + 1.6e-5 * position
                        if use_cache
                        else 0.9 * position / 1024 * (1.3 if attention == "eager" else 1)
                    )
                    rows.append(
                        {
                            "attention": attention,
                            "context_length": context,
                            "output_tokens": output,
                            "use_cache": use_cache,
                            "repetition": repetition,
                            "pair": f"{attention}-{repetition}",
                            "step": step,
                            "position": position,
                            "step_s": step_s * noise(rng),
                            "ttft_s": 0.9 * context / 1024 * (1.3 if attention == "eager" else 1),
                        }
                    )
    return pd.DataFrame(rows)


def served_points():
    return [(length, 1) for length in CONTEXTS] + [(512, concurrency) for concurrency in (2, 4, 8)]


def requests(repetitions=3, seed=3):
    """S1's requests: S1b's lengths at concurrency 1, and a sweep of the concurrency at one length."""
    rng, rows = np.random.default_rng(seed), []
    for context, concurrency in served_points():
        for repetition in range(repetitions):
            for index in range(4 * concurrency):
                rows.append(
                    {
                        "context_length": context,
                        "concurrency": concurrency,
                        "output_tokens": 32,
                        "repetition": repetition,
                        "enforce_eager": True,
                        "phase": "warmup" if index < concurrency else "measured",
                        "status": "ok",
                        "reason": None,
                        "void": None,
                        "tokens": 32,
                        "ttft_s": 0.4 * context / 1024 * (1 + 0.7 * concurrency) * noise(rng),
                        "tpot_s": 0.021 * (1 + 0.22 * concurrency + context / 8192) * noise(rng),
                        "e2e_s": 1.0,
                    }
                )
    return pd.DataFrame(rows)


def points(repetitions=3, seed=4):
    """S1's points; one run at concurrency 8 was too short for a throughput."""
    rng, rows = np.random.default_rng(seed), []
    for context, concurrency in served_points():
        for repetition in range(repetitions):
            short = concurrency == 8 and repetition == 0
            rows.append(
                {
                    "context_length": context,
                    "concurrency": concurrency,
                    "enforce_eager": True,
                    "repetition": repetition,
                    "throughput_tokens_per_s": np.nan if short else 38 * concurrency**0.7 * noise(rng),
                    "void": None,
                    "window_s": 5.0,
                    "completed": 4 * concurrency,
                    "failed": 0,
                    "kv_cache_usage_max": 0.021 * concurrency * noise(rng),
                }
            )
    return pd.DataFrame(rows)


def frames_of(chart):
    """What charts.<chart> takes before the language."""
    return {
        "mechanism": (),
        "tpot_by_context": (generations(),),
        "ttft_by_context": (generations(),),
        "speedups_by_context": (pairs(),),
        "step_curve": (steps(),),
        "phase_share": (generations(),),
        "serving_by_concurrency": (requests(), points()),
        "kv_usage_by_concurrency": (points(),),
        "growth_side_by_side": (generations(), requests()),
        "kv_bytes_by_context": (generations(), kv_cache_bytes),
    }[chart]
