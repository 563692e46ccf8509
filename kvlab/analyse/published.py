"""Figures that others published, carried over with their source, to hold predictions for GPUs against."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from kvlab.analyse.architecture import known_models
from kvlab.analyse.calibrate import GPU_STEP_TERMS, Calibration, Point, calibrate, residuals
from kvlab.analyse.predict import Case, Machine

FIGURES = Path(__file__).parent / "published.csv"
KNOWN_MACHINES = Path(__file__).parent / "known_machines.yaml"
STACK = {"tgi": "vllm"}  # both run graphs of fused kernels over a paged cache


@cache
def known_machines() -> dict[str, Machine]:
    """Cards by their data sheets, uncalibrated: no launch times and no losses."""
    sheets = yaml.safe_load(KNOWN_MACHINES.read_bytes())
    return {name: _from_sheet(name, dict(sheet)) for name, sheet in sheets.items()}


def _from_sheet(name: str, sheet: dict) -> Machine:
    power_w, bandwidth = sheet.pop("power_w"), sheet["read_bandwidth_bytes_per_s"]
    return Machine(name, copy_bandwidth_bytes_per_s=bandwidth, launch_s_per_layer=0.0, launch_overlaps=True,
                   kind="data sheet", power_w=power_w, **sheet)  # fmt: skip


def figures() -> pd.DataFrame:
    """One row per published figure: card, stack, model, setting, quantity, value (s or tokens/s), source."""
    return pd.read_csv(FIGURES, keep_default_na=False)


def points(rows: pd.DataFrame) -> list[Point]:
    """The figures as points that a predictor can be held against."""
    return [Point(_case(row), row["quantity"], row["value"]) for row in rows.to_dict("records")]


def _case(row: dict) -> Case:
    shared = {name: row[name] for name in ("context", "output_tokens", "batch", "dtype", "attention", "all_logits")}
    return Case(known_models()[row["model"]], stack=STACK.get(row["stack"], row["stack"]), **shared)


def calibration_rows(rows: pd.DataFrame) -> pd.Series:
    """Which figures calibrate, by one rule: every second one of each source; the others only test.

    Of a source with several models every second model in alphabetical order, with all its rows; of a source with one
    model every second row; of a source with a single row none.
    """
    chosen = pd.Series(False, index=rows.index)
    for _, group in rows.groupby("source", sort=False):
        models = sorted(group["model"].unique())
        if len(models) > 1:
            chosen[group.index[group["model"].isin(models[::2])]] = True
        elif len(group) > 1:
            chosen[group.index[::2]] = True
    return chosen


@cache
def calibrated(card: str) -> Calibration:
    """A card with the losses of the published figures: fitted on half of them, its residuals those on the others.

    What a step takes is fitted on generations, then the products' rate on prefills, all on the card that most figures
    are of; another card's data sheet is scaled by the same shares, and its launch times are taken to be the same.
    The form of the predictor was chosen with all figures in view; its coefficients have seen the first half only.
    """
    rows, sheets = figures(), known_machines()
    chosen, home = calibration_rows(rows), sheets[rows["gpu"].value_counts().idxmax()]
    prefill = rows["quantity"] == "ttft_s"
    step = calibrate(home, points(rows[chosen & ~prefill]), [], GPU_STEP_TERMS).machine
    fitted = calibrate(replace(step, kind="data sheet"), points(rows[chosen & prefill]), [], ("flops_per_s",)).machine
    tested = [(transferred(fitted, home, sheets[name]), points(group)) for name, group in rows[~chosen].groupby("gpu")]
    misses = np.concatenate([residuals(machine, group) for machine, group in tested])
    held_out = [p for _, group in tested for p in group]
    return Calibration(transferred(fitted, home, sheets[card]), points(rows[chosen]), held_out, misses)


def transferred(fitted: Machine, home: Machine, sheet: Machine) -> Machine:
    """Another card at the same shares of its data sheet, with the same launch times."""
    share = fitted.read_bandwidth_bytes_per_s / home.read_bandwidth_bytes_per_s
    products = fitted.flops_per_s["float16"] / home.flops_per_s["float16"]
    return replace(
        sheet, kind="calibrated", source=f"{sheet.source}, at the shares that published figures reach on {home.name}",
        read_bandwidth_bytes_per_s=sheet.read_bandwidth_bytes_per_s * share,
        copy_bandwidth_bytes_per_s=sheet.copy_bandwidth_bytes_per_s * share,
        flops_per_s={dtype: rate * products for dtype, rate in sheet.flops_per_s.items()},
        launch_s_per_layer=fitted.launch_s_per_layer, launch_s_per_operation=fitted.launch_s_per_operation,
        kernel_s=fitted.kernel_s,
    )  # fmt: skip


def held_against() -> pd.DataFrame:
    """Every published figure with its prediction: `predicted`, `residual`, `regime`, and whether it `calibrates`."""
    rows = figures()
    found = [calibrated(card).predict(p.case, p.quantity) for card, p in zip(rows["gpu"], points(rows))]
    rows = rows.assign(predicted=[p.value for p in found], regime=[p.regime for p in found])
    return rows.assign(residual=rows["predicted"] / rows["value"] - 1, calibrates=calibration_rows(rows))
