"""What a vLLM server says of itself at /metrics, under the names of old and new releases."""

import re

LINE = re.compile(r"^(vllm:\w+?)(?:_total)?(?:\{.*\})?\s+(\S+)", re.MULTILINE)
# each quantity: the names it has had, newest first; counters may carry "_total"
NAMES = {
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "preemptions": ("vllm:num_preemptions",),
    "prompt_tokens": ("vllm:prompt_tokens",),
    "generation_tokens": ("vllm:generation_tokens",),
    "prefix_queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "prefix_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "ttft_sum_s": ("vllm:time_to_first_token_seconds_sum",),
    "ttft_count": ("vllm:time_to_first_token_seconds_count",),
}
GAUGES = ("kv_cache_usage", "running", "waiting")
SAMPLED = (*GAUGES, "preemptions")
COUNTERS = tuple(name for name in NAMES if name not in GAUGES)
CONFIGURATION = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)


def parse(text):
    """Quantity -> value summed over engines (KV usage: of the fullest, 0..1); None where none is told."""
    samples = {}
    for name, value in LINE.findall(text or ""):
        samples.setdefault(name, []).append(float(value))
    return {quantity: _value(quantity, names, samples) for quantity, names in NAMES.items()}


def _value(quantity, names, samples):
    values = next((samples[name] for name in names if name in samples), None)
    if values is None:
        return None
    # both names end in "perc", and both hold a ratio: 1 means full
    return max(values) if quantity == "kv_cache_usage" else sum(values)


def deltas(before, after):
    """Counter -> its rise between two parsed texts; None where either lacks it."""
    rises = {name: (before[name], after[name]) for name in COUNTERS}
    return {name: None if None in pair else pair[1] - pair[0] for name, pair in rises.items()}


def sample(t_s, text):
    """One server sample of a point record: seconds from its start, KV usage (0..1), running, waiting, preemptions.

    Preemptions are counted since the server's start.
    """
    values = parse(text)
    return {"t_s": t_s, **{name: values[name] for name in SAMPLED}}


def cache_blocks(text):
    """(blocks, tokens in a block) of the KV cache, as the server configured it; None for what it does not tell."""
    told = CONFIGURATION.search(text or "")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', told[1])) if told else {}
    numbers = [labels.get(name, "") for name in ("num_gpu_blocks", "block_size")]
    return tuple(int(number) if number.isdecimal() else None for number in numbers)
