"""The law of a step's time over the length: a + b n + c n², none negative, fitted and tested on lengths left out."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from kvlab.analyse import cost
from kvlab.analyse.summary import measured

GROUP = ["attention", "use_cache"]
TERMS = ("constant", "linear", "quadratic")
FEWEST_LENGTHS = 3  # as many as there are terms; a law through just as many points meets them exactly


@dataclass(frozen=True)
class Law:
    """Seconds of one step over a sequence of n tokens: constant + linear n + quadratic n²."""

    constant_s: float
    linear_s: float
    quadratic_s: float

    def parts_s(self, tokens) -> np.ndarray:
        """Seconds that each term contributes; (terms, lengths) or (terms,)."""
        n = np.asarray(tokens, dtype=float)
        return np.array([self.constant_s * np.ones_like(n), self.linear_s * n, self.quadratic_s * n**2])

    def __call__(self, tokens) -> np.ndarray:
        return self.parts_s(tokens).sum(axis=0)


def fit(tokens, times_s) -> Law:
    """The law that is nearest by relative errors (non-negative least squares, weights 1 / time)."""
    n, times = np.asarray(tokens, dtype=float), np.asarray(times_s, dtype=float)
    powers = np.vander(n / n.max(), 3, increasing=True)  # (lengths, terms)
    found, _ = nnls(powers / times[:, None], np.ones_like(times))
    return Law(*(float(value) for value in found / n.max() ** np.arange(3)))


def step_times(generations: pd.DataFrame) -> pd.DataFrame:
    """Median time per step of every kernel, arm and length; `tokens` is the mean length of its decode steps."""
    rows = measured(generations)
    rows = rows.assign(tokens=rows["context_length"] + rows["output_tokens"] / 2)
    return rows.groupby([*GROUP, "context_length", "tokens"])["tpot_s"].median().dropna().reset_index(name="step_s")


def groups(times: pd.DataFrame) -> list[tuple[dict, pd.DataFrame]]:
    """(kernel and arm, its lengths in order) of those with enough lengths for a law."""
    found = [(dict(zip(GROUP, keys)), rows.sort_values("tokens")) for keys, rows in times.groupby(GROUP)]
    return [(name, rows) for name, rows in found if len(rows) >= FEWEST_LENGTHS]


def laws(times: pd.DataFrame) -> list[tuple[dict, Law, int]]:
    """(kernel and arm, the law over all its lengths, how many lengths)."""
    return [(name, fit(rows["tokens"], rows["step_s"]), len(rows)) for name, rows in groups(times)]


def left_out(rows: pd.DataFrame) -> np.ndarray:
    """Every second length, so that the longest is fitted: True for those that only test the law."""
    return (np.arange(len(rows))[::-1] % 2).astype(bool)


def residuals(times: pd.DataFrame) -> pd.DataFrame:
    """Relative error of the law of every second length (fitted over measured, less 1), at all lengths.

    Kernels and arms whose half has too few lengths for a law are left out.
    """
    found = []
    for _, rows in groups(times):
        half = rows[~left_out(rows)]
        if len(half) >= FEWEST_LENGTHS:
            fitted_s = fit(half["tokens"], half["step_s"])(rows["tokens"])
            errors = np.round(fitted_s / rows["step_s"] - 1, 6)
            found.append(rows.assign(fitted_s=fitted_s, residual=errors, left_out=left_out(rows)))
    columns = [*GROUP, "context_length", "tokens", "step_s", "fitted_s", "residual", "left_out"]
    return pd.concat(found)[columns] if found else pd.DataFrame(columns=columns)


def arithmetic(a: cost.Architecture, use_cache: bool, dtype: str, attention: str, tokens: int) -> list[float]:
    """Shares of the three terms at this length as arithmetic has them.

    Without cache by FLOPs: the matrices linear, attention quadratic. With it by bytes: the weights constant, the
    cache and its copies linear.
    """
    if use_cache:
        moved = cost.kv_cache_bytes(a, tokens, dtype) + cost.cache_copy_bytes(a, tokens, dtype, attention)
        parts = [cost.step_weight_bytes(a, dtype), moved, 0]
    else:
        linear = tokens * (cost.forward_flops(a, 2, 0) - cost.forward_flops(a, 1, 0))
        parts = [0, linear, cost.forward_flops(a, tokens, tokens) - cost.forward_flops(a, tokens, 0)]
    return [part / sum(parts) for part in parts]


def recomputed(steps: pd.DataFrame) -> pd.DataFrame:
    """First decode steps without cache, over the prefill of the same generation (of one token less)."""
    first = steps[(steps["step"] == 1) & ~steps["use_cache"].astype(bool)]
    return first.assign(step_over_prefill=first["step_s"] / first["ttft_s"])
