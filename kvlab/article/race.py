"""Both arms of one generation as they happen: step times as tokens come, live or as a GIF of what was recorded."""

import io

import matplotlib.style
import numpy as np
from PIL import Image

from kvlab.article import drawing, prose
from kvlab.article.drawing import COLOUR

ARMS = ((True, "cache"), (False, "no_cache"))
DOTS_PER_INCH = 80
GIF_SECONDS, GIF_FRAMES = 6.0, 48


class Race:
    """Two panels, one arm each, on one scale: the time of every token against its number, so far.

    Arrivals are {use_cache: seconds since the arm's start at which each token came, the first one from prefill}.
    """

    def __init__(self, language: str, context_length: int, output_tokens: int) -> None:
        self._language, self._output_tokens = language, output_tokens
        names = [drawing.label(name, language) for _, name in ARMS]
        drawing.font_path()
        with matplotlib.style.context(drawing.STYLE):
            self._figure, self._axes = drawing.panels(language, "race", names, height=3, context_length=context_length)
            for ax, (_, name) in zip(self._axes, ARMS):
                ax.plot([], [], color=COLOUR[name], marker=drawing.MARKER[name], markersize=4)
                ax.set(xlim=(0.3, output_tokens + 0.7), xlabel=drawing.label("output_token", language))
                ax.yaxis.set_major_formatter(lambda value, _: prose.friendly(value, "s", language))
            self._axes[0].set_ylabel(drawing.label("token_time", language))

    def draw(self, arrivals: dict[bool, list[float]], now_s: float = np.inf) -> bytes:
        """The picture at `now_s` seconds after both arms started, as PNG."""
        with matplotlib.style.context(drawing.STYLE):
            for ax, (use_cache, name) in zip(self._axes, ARMS):
                came = [at_s for at_s in arrivals.get(use_cache, []) if at_s <= now_s]
                ax.lines[0].set_data(range(1, len(came) + 1), np.diff([0.0, *came]))
                so_far = {"tokens": len(came), "of": self._output_tokens, "seconds": came[-1] if came else 0.0}
                arm = drawing.label(name, self._language)
                ax.set_title(prose.plain("label.race_so_far", self._language, arm=arm, **so_far), color=COLOUR[name])
            slowest_s = max([float(step_s) for ax in self._axes for step_s in ax.lines[0].get_ydata()], default=0.0)
            for ax in self._axes:
                ax.set_ylim(0, slowest_s * 1.12 or 1.0)
            picture = io.BytesIO()
            self._figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
            return picture.getvalue()

    def gif(self, arrivals: dict[bool, list[float]]) -> bytes:
        """The whole race in GIF_SECONDS, however long it took; the last picture stays for two seconds."""
        end_s = max(times[-1] for times in arrivals.values())
        moments = np.linspace(0, end_s, GIF_FRAMES)
        frames = [Image.open(io.BytesIO(self.draw(arrivals, now_s))).convert("RGB").quantize(64) for now_s in moments]
        durations_ms = [round(1000 * GIF_SECONDS / GIF_FRAMES)] * (GIF_FRAMES - 1) + [2000]
        moving = io.BytesIO()
        frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:], duration=durations_ms, loop=0)
        return moving.getvalue()
