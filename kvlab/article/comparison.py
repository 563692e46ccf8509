"""Two runs side by side: ratios with intervals, and a refusal of what is not comparable."""

from types import SimpleNamespace

import nbformat
import pandas as pd

from kvlab.analyse.summary import POINT, SERVED, Estimate, interval, measured
from kvlab.article import prose

MUST_AGREE = ("model", "model_revision", "dtype", "batch_size")


class NotComparable(ValueError):
    """The two runs differ in more than their machine; the message says in what."""


def check(a: SimpleNamespace, b: SimpleNamespace) -> None:
    """Raise NotComparable where the parameters of two runs differ in what a ratio between them must not mix."""
    names = [name for name in MUST_AGREE if getattr(a, name, None) != getattr(b, name, None)]
    pairs = [f"{name} ({getattr(a, name, None)!r} and {getattr(b, name, None)!r})" for name in names]
    if pairs:
        raise NotComparable(f"{a.profile} and {b.profile} differ in {', '.join(pairs)}; compare runs that agree in it")


def ratio(a: Estimate, b: Estimate) -> Estimate:
    """b over a for two independent samples; the interval's ends are those of both intervals, so it is a wide one."""
    return Estimate(min(a.n, b.n), b.median / a.median, b.low / a.high, b.high / a.low, "ok")


def rows(a: pd.DataFrame, b: pd.DataFrame, by: list[str], values: list[str]) -> list[dict]:
    """One row per point that both frames have and per value: both medians and their ratio."""
    shared = [dict(zip(by, key)) for key in groups(a, by) if key in groups(b, by)]
    found = []
    for point in shared:
        samples = [groups(frame, by)[tuple(point.values())] for frame in (a, b)]
        for value in values:
            one, other = (interval(sample[value]) for sample in samples)
            if one.n and other.n:
                found.append({**point, "value": value, "a": one, "b": other, "ratio": ratio(one, other)})
    return found


def groups(frame: pd.DataFrame, by: list[str]) -> dict[tuple, pd.DataFrame]:
    return {key: rows for key, rows in frame.groupby(by, sort=True)}


def on_off(a: pd.DataFrame, b: pd.DataFrame) -> list[dict]:
    """S1b: `rows` of two frames of generations, arm by arm."""
    return rows(measured(a), measured(b), [*POINT, "use_cache"], ["ttft_s", "tpot_s"])


def serving(a: pd.DataFrame, b: pd.DataFrame) -> list[dict]:
    """S1: `rows` of two frames of requests."""
    return rows(measured(a), measured(b), SERVED, ["ttft_s", "tpot_s"])


def notebook(names: tuple[str, str], machines: tuple[dict, dict], tables: dict[str, list[dict]], language: str):
    """The comparison as a notebook of one language, ready for `render.page`; `tables` maps "s1b" and "s1" to rows."""
    told = {"machines": {"a": machines[0], "b": machines[1]}, "how": {}}
    texts = [f"# {prose.plain('compare.title', language, a=names[0], b=names[1])}"]
    texts += [str(prose.text(f"compare.{key}", language, **numbers)) for key, numbers in told.items()]
    cells = [nbformat.v4.new_markdown_cell(each) for each in texts]
    for experiment, found in tables.items():
        cells.append(nbformat.v4.new_markdown_cell(f"## {prose.plain(f'compare.{experiment}', language)}"))
        html = html_table(experiment, found, names, language) if found else prose.plain("compare.nothing", language)
        output = nbformat.v4.new_output("display_data", {"text/html": html})
        cells.append(nbformat.v4.new_code_cell("", outputs=[output]))
    return nbformat.v4.new_notebook(cells=cells)


def html_table(experiment: str, found: list[dict], names: tuple[str, str], language: str) -> str:
    shown = [row | {"value": row["value"].removesuffix("_s")} for row in found]
    source = " / ".join(f"results/{name}/{experiment}.jsonl" for name in names)
    return prose.html_table(shown, f"compare_{experiment}", language, source)
