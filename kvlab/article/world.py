"""Published figures beside what we predict for them: a table with residuals and sources, and how far off they are."""

import re

from kvlab.article import prose

ASSUMED = "; prompt length not given, 64 assumed"  # of a source
UNITS = {"throughput_tokens_per_s": "rate"}  # all others are seconds


def table(held, language):
    """Every figure that nothing was fitted to, worst first, then the sentence; `held` is `published.held_against()`."""
    tested = held[~held["calibrates"]]
    tested = tested.reindex(tested["residual"].abs().sort_values(ascending=False).index)
    rows = [_shown(row) for row in tested.to_dict("records")]
    prose.table(rows, "world", language)
    step = tested[tested["quantity"] != "ttft_s"]["residual"].abs()
    prefill = tested[tested["quantity"] == "ttft_s"]["residual"].abs()
    numbers = {"fitted": int(held["calibrates"].sum()), "tested": len(tested), "step": step.median(),
               "prefill": prefill.median(), "worst": tested["residual"].abs().max()}  # fmt: skip
    prose.say("world.reading", language, source="published", **numbers)
    for source in sorted(set(tested["source"])):
        origin = source.removesuffix(ASSUMED)
        prose.say("world.origin" if origin == source else "world.origin_assumed", language, origin=origin)


def _shown(row: dict) -> dict:
    unit = UNITS.get(row["quantity"], "s")
    values = {name: {each: prose.friendly(row[column], unit, each) for each in prose.LANGUAGES}
              for name, column in (("published", "value"), ("predicted", "predicted"))}  # fmt: skip
    key = f"world.{'eager_loop' if row['stack'] == 'transformers' else 'served'}"
    setting = {"attention": row["attention"], "batch": row["batch"]}
    quantity = {each: prose.plain(key, each, quantity=prose.plain(f"world.{row['quantity']}", each), **setting)
                for each in prose.LANGUAGES}  # fmt: skip
    same = {name: row[name] for name in ("stack", "model", "residual")}
    return {"card": row["gpu"], "quantity": quantity, "source": re.split("[,;]", row["source"])[0], **same, **values}
