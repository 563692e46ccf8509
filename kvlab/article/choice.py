"""One what-if as numbers and a picture: predictions at a chosen point, measured points on top where there are any."""

import io
from dataclasses import dataclass, replace

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import NullLocator
from PIL import Image

from kvlab.analyse import cost, predict
from kvlab.analyse.predict import Case, Machine
from kvlab.article import drawing, prose
from kvlab.article.drawing import COLOUR

DOTS_PER_INCH = 80
ROUND = np.outer(10.0 ** np.arange(-12, 12), (1, 2, 5)).ravel()  # between these an axis stands still
WIDTH_PIXELS = 592  # of every figure: 7.4 inches
ARMS = ((True, "cache"), (False, "no_cache"))
QUANTITIES = {  # in the order of the table: unit
    "ttft_s": "s", "tpot_s": "s", "tpot_no_cache_s": "s", "total_s": "s", "total_no_cache_s": "s",
    "tpot_speedup": "x", "total_speedup": "x",
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """What the controls say."""

    machine: Machine
    case: Case

    @property
    def kv_bytes(self) -> int:
        """Of one request at its end, as an engine keeps it."""
        tokens = self.case.context + self.case.output_tokens
        return cost.kv_cache_bytes(self.case.model, tokens, self.case.kv_dtype or self.case.dtype, layout="engine")

    @property
    def requests_that_fit(self) -> int | None:
        """In the memory that the weights leave; None where the machine's memory is not known."""
        if not self.machine.memory_bytes:
            return None
        left = self.machine.memory_bytes - cost.weight_bytes(self.case.model, self.case.dtype)
        return max(0, int(left // self.kv_bytes))


def table(choice: Choice, language: str) -> str:
    """What is predicted and what is computed from the model's configuration, as an HTML table that says which."""
    found = {name: (predict.QUANTITIES[name](choice.machine, choice.case), unit) for name, unit in QUANTITIES.items()}
    rows = [(name, each.value, unit, bound_by(each), "kind.predicted") for name, (each, unit) in found.items()]
    rows.append(("kv_bytes", choice.kv_bytes, "B", None, "choice.computed"))
    rows.append(("requests_that_fit", choice.requests_that_fit, "count", None, "choice.computed"))
    rows = [
        {"what": prose.both(f"choice.{name}"), "value": prose.friendly(value, unit, language)}
        | {"regime": bound, "kind": prose.both(kind)}
        for name, value, unit, bound, kind in rows
    ]
    headings = {name: f"choice.{name}" for name in ("what", "value", "regime", "kind")}
    return prose.html_table(rows, headings, language, choice.machine.source or choice.machine.name)


def bound_by(found: predict.Prediction) -> dict[str, str]:
    """Its regime, and of a whole generation the phase that takes longer, whose regime it is."""
    regime, phase = prose.both(f"choice.{found.regime}"), found.phase and prose.both(f"label.{found.phase}")
    return prose.both("choice.in_phase", regime=regime, phase=phase) if phase else regime


def curve_point(choice: Choice, context: int) -> dict[str, float]:
    """What the picture shows at one context length: TPOT of both arms in seconds, and both speed-ups."""
    case = replace(choice.case, context=context)
    prefill_s = predict.ttft_s(choice.machine, case).value
    tpot = {name: predict.tpot_s(choice.machine, case, use_cache).value for use_cache, name in ARMS}
    total = {name: prefill_s + (case.output_tokens - 1) * step_s for name, step_s in tpot.items()}
    speedups = {"tpot_speedup": tpot, "total_speedup": total}
    return tpot | {name: arms["no_cache"] / arms["cache"] for name, arms in speedups.items()}


class Picture:
    """TPOT and speed-ups over context length; what stands still is drawn once, a move draws the rest on top of it."""

    def __init__(self, language: str, lengths: list[int]) -> None:
        self._language, self._lengths = language, lengths
        names = [drawing.label(name, language) for name in ("tpot", "speedup_axis")]
        drawing.font_path()
        with matplotlib.style.context(drawing.STYLE):
            self._figure, axes = drawing.panels(language, "choice", names, height=3.4, sharey=False, machine="")
            self._lines = {name: self._line(axes[0], name, COLOUR[name], "s") for name in ("cache", "no_cache")}
            gains = {"tpot_speedup": COLOUR["vllm"], "total_speedup": COLOUR["sdpa"]}
            self._lines |= {name: self._line(axes[1], name, colour, "x") for name, colour in gains.items()}
            for height, (name, line) in zip((0.92, 0.82) * 2, self._lines.items()):
                ax, colour = line["ax"], line["predicted"].get_color()
                ax.text(0.03, height, drawing.label(name, language), transform=ax.transAxes, color=colour)
            self._figure.set(layout_engine="none", dpi=DOTS_PER_INCH)
            axes[0].set_position((0.11, 0.18, 0.36, 0.62))
            axes[1].set_position((0.61, 0.18, 0.37, 0.62))
            self._canvas = FigureCanvasAgg(self._figure)
            self._scales = [self._figure._suptitle, *(part for ax in axes for part in (ax.yaxis, *ax.spines.values()))]
            self._moving = [line for ax in axes for line in ax.lines if not line.get_animated()]
            for part in (*self._scales, *self._moving):
                part.set_animated(True)
            self._canvas.draw()
        self._still = self._canvas.copy_from_bbox(self._figure.bbox)
        # What was drawn last, and what for: the scales, and with them the lines without the chosen point.
        self._scaled = self._drawn = (None, self._still)

    def _line(self, ax, name: str, colour: str, unit: str) -> dict:
        ax.set_xscale("log", base=2)
        ax.set(yscale="log", xlabel=drawing.label("context_length", self._language))
        ax.set_xlim(self._lengths[0] / 1.2, self._lengths[-1] * 1.2)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.yaxis.set_major_formatter(lambda value, _: prose.friendly(value, unit, self._language))
        ax.yaxis.set_label_coords(0, 0)  # there is none to place
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_minor_locator(NullLocator())
        (predicted,) = ax.plot([1, 2], [1, 2], linestyle="--", color=colour)
        (chosen,) = ax.plot([1], [1], marker="o", markersize=9, markerfacecolor="none", color=colour, animated=True)
        (measured,) = ax.plot([], [], marker="o", markersize=4, linestyle="none", color=colour, alpha=0.6)
        return {"predicted": predicted, "chosen": chosen, "measured": measured, "ax": ax}

    def draw(self, choice: Choice, measured: pd.DataFrame) -> bytes:
        """The picture as PNG; `measured` has columns context_length, use_cache and tpot_s."""
        key = (choice.machine, replace(choice.case, context=1), len(measured))
        if self._drawn[0] != key:
            self._set_lines(choice, measured)
            self._drawn = (key, self._on(self._scaled[1], self._moving))
        self._canvas.restore_region(self._drawn[1])
        here = curve_point(choice, choice.case.context)
        for name, line in self._lines.items():  # all that moves with the context length
            line["chosen"].set_data([choice.case.context], [here[name]])
            line["ax"].draw_artist(line["chosen"])
        picture = io.BytesIO()
        Image.fromarray(np.asarray(self._canvas.buffer_rgba())).save(picture, "PNG", compress_level=1)
        return picture.getvalue()

    def _set_lines(self, choice: Choice, measured: pd.DataFrame) -> None:
        points = {n: curve_point(choice, n) for n in self._lengths}
        for name, line in self._lines.items():
            line["predicted"].set_data(self._lengths, [points[n][name] for n in self._lengths])
        for use_cache, name in ARMS:
            here = measured["use_cache"] == use_cache
            self._lines[name]["measured"].set_data(measured["context_length"][here], measured["tpot_s"][here])
        scales = (choice.machine.name, [self._round_ends(ax) for ax in self._figure.axes])
        if self._scaled[0] != scales:
            self._set_scales(*scales)
            self._scaled = (scales, self._on(self._still, self._scales))

    def _set_scales(self, machine: str, ends: list[tuple[int, int]]) -> None:
        self._figure.suptitle(prose.plain("charts.choice.title", self._language, machine=machine), x=0.012, ha="left")
        for ax, (low, high) in zip(self._figure.axes, ends):
            ax.set_yticks(ROUND[low : high + 1] if high - low < 7 else ROUND[-(-low // 3) * 3 : high + 1 : 3])
            ax.set_ylim(ROUND[low], ROUND[high])

    def _on(self, below, parts: list) -> object:
        self._canvas.restore_region(below)
        with matplotlib.style.context(drawing.STYLE):
            for part in parts:
                part.draw(self._canvas.get_renderer())
        return self._canvas.copy_from_bbox(self._figure.bbox)

    def _round_ends(self, ax) -> tuple[int, int]:
        """Places in ROUND just below and above all that the axes' lines show."""
        heights = [y for line in ax.lines if line in self._moving for y in line.get_ydata()]
        return int(ROUND.searchsorted(np.nanmin(heights) / 1.1)) - 1, int(ROUND.searchsorted(np.nanmax(heights) * 1.1))
