"""Fitting a machine's few efficiency terms to some points, and saying how far off the others then are."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from scipy import optimize

from kvlab.analyse.architecture import Architecture
from kvlab.analyse.findings import proven
from kvlab.analyse.predict import QUANTITIES, Case, Machine, Prediction
from kvlab.analyse.summary import POINT, measured


@dataclass(frozen=True)
class Point:
    """A measured or published value to calibrate on or to test against."""

    case: Case
    quantity: str  # a key of QUANTITIES
    value: float


def residuals(m: Machine, points: list[Point]) -> np.ndarray:
    """Predicted over measured, less one, of each point."""
    return np.array([QUANTITIES[p.quantity](m, p.case).value / p.value - 1 for p in points])


@dataclass(frozen=True)
class Calibration:
    """A machine with fitted efficiencies, what it was fitted on, and its residuals on points it had not seen."""

    machine: Machine
    fitted_on: list[Point]
    held_out: list[Point]
    residuals: np.ndarray = field(compare=False)

    def predict(self, case: Case, quantity: str) -> Prediction:
        """The quantity with the range in which the held-out points' true values lay.

        The range covers nine tenths of the points of the same sort (prefill or generation), all of them below twenty;
        without such a point there is none.
        """
        found, prefill = QUANTITIES[quantity](self.machine, case), quantity == "ttft_s"
        same = np.array([(p.quantity == "ttft_s") == prefill for p in self.held_out], dtype=bool)
        if not same.any():
            return found
        over = 1 / (1 + self.residuals[same])  # true over predicted
        low, high = np.quantile(over, [0.05, 0.95] if same.sum() >= 20 else [0, 1])
        faster = quantity == "throughput_tokens_per_s"
        low, high = (1 / high, 1 / low) if faster else (low, high)
        return replace(found, low=found.value * float(low), high=found.value * float(high))


CPU_TERMS = ("read_bandwidth_bytes_per_s", "copy_bandwidth_bytes_per_s", "flops_per_s", "launch_s_per_layer", "page_s")
GPU_STEP_TERMS = ("bandwidth", "launch_s_per_layer", "launch_s_per_operation", "kernel_s")
START = {"launch_s_per_layer": 2e-4, "launch_s_per_operation": 1e-5, "kernel_s": 5e-6, "page_s": 1e-6}
RATES = ("bandwidth", "read_bandwidth_bytes_per_s", "copy_bandwidth_bytes_per_s", "flops_per_s")
BELIEF = 1.0  # standard deviation, in natural logarithms, of a term around its ceiling or START


def calibrate(
    m: Machine, points: list[Point], held_out: list[Point], terms: tuple[str, ...] = CPU_TERMS
) -> Calibration:
    """Fit the machine's few efficiency terms to `points`, on the logarithm of predicted over measured.

    Every term is a factor on the ceiling (or on a usual value where there is none) and is held to it weakly, so that
    points that say nothing about a term leave it alone; no rate of a data sheet is exceeded. A soft loss keeps one odd
    point from deciding.
    """
    start = replace(m, **{name: START[name] for name in terms if name in START and not getattr(m, name)})

    def errors(logs: np.ndarray) -> np.ndarray:
        fitted = scaled(start, terms, np.exp(logs))
        misses = np.log1p(residuals(fitted, points))
        return np.concatenate([misses / 0.1, logs / BELIEF])

    most = [0.0 if m.kind == "data sheet" and name in RATES else np.inf for name in terms]
    found = optimize.least_squares(errors, np.full(len(terms), -0.1), bounds=(-np.inf, most), loss="soft_l1")
    fitted = replace(scaled(start, terms, np.exp(found.x)), kind="calibrated")
    return Calibration(fitted, points, held_out, residuals(fitted, held_out))


def on_lengths(m: Machine, points: list[Point]) -> Calibration:
    """Calibrate on every second context length, the shortest included, and test on the lengths between."""
    lengths = sorted({p.case.context for p in points})
    fitted_on, held_out = ([p for p in points if (p.case.context in lengths[::2]) == half] for half in (True, False))
    ratios = ("tpot_speedup", "total_speedup")  # follow from the times: no information of their own
    return calibrate(m, [p for p in fitted_on if p.quantity not in ratios], held_out)


def measured_points(model: Architecture, dtype: str, generations: pd.DataFrame, pairs: pd.DataFrame) -> list[Point]:
    """Medians of S1b's frames (see `summary`) as points by kernel and length: TTFT, both TPOT, both speed-ups."""
    arms = measured(generations)
    named = {True: {"ttft_s": "ttft_s", "tpot_s": "tpot_s"}, False: {"tpot_s": "tpot_no_cache_s"}}
    medians = [(rows[column].median(), quantity, setting) for *setting, used, rows in _groups(arms, "use_cache")
               for column, quantity in named[used].items()]  # fmt: skip
    medians += [(rows[ratio].median(), ratio, setting) for *setting, rows in _groups(proven(pairs))
                for ratio in ("tpot_speedup", "total_speedup")]  # fmt: skip
    return [Point(Case(model, context, output, batch, dtype, attention, cache), quantity, float(value))
            for value, quantity, (attention, cache, context, output, batch) in medians if value == value]  # fmt: skip


def _groups(frame: pd.DataFrame, *more: str) -> list[tuple]:
    by = [*POINT, *more]
    return [(*keys, rows) for keys, rows in frame.fillna({"cache": "dynamic", "batch_size": 1}).groupby(by)]


def scaled(m: Machine, terms: tuple[str, ...], factors: np.ndarray) -> Machine:
    """The machine with each term multiplied by its factor; "bandwidth" stands for reading and copying alike."""
    by_name, changed = dict(zip(terms, (float(factor) for factor in factors))), {}
    if "bandwidth" in by_name:
        factor = by_name.pop("bandwidth")
        by_name |= {"read_bandwidth_bytes_per_s": factor, "copy_bandwidth_bytes_per_s": factor}
    for name, factor in by_name.items():
        value = getattr(m, name)
        is_table = isinstance(value, Mapping)
        changed[name] = {key: each * factor for key, each in value.items()} if is_table else value * factor
    return replace(m, **changed)
