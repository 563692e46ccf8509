"""Under many streams at once a token that the client loses would lower every throughput it reports."""

import importlib.util

from kvlab import paths


def load():
    spec = importlib.util.spec_from_file_location("load", paths.ROOT / "benchmarks" / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sixty_four_streams_and_twenty_thousand_tokens_lose_none():
    row = load().run(64, 320, step_ms=5)
    assert row["streams"] == 64 and row["failed requests"] == 0
    counts = {name: row[name] for name in row if name.startswith("tokens")}
    assert counts == dict.fromkeys(counts, 64 * 320)
