"""The tinkerer's panel: a prediction at every move, a real pair at a press of a button, and its tokens as they come."""

import threading
import time
from types import SimpleNamespace

import ipywidgets
import pandas as pd
import yaml
from IPython.display import HTML, Image, display

from kvlab import models, params, paths, report, sweep, whatif
from kvlab.analyse import cost, published, summary
from kvlab.analyse.predict import Case, Machine
from kvlab.article import choice, prose
from kvlab.article.race import Race
from kvlab.measure import provenance
from kvlab.measure.worker import Worker

LENGTHS = tuple(2**power for power in range(4, 16))
OUTPUTS = tuple(2**power for power in range(1, 10))
REDRAW_S = 0.3
MINE = "mine"  # the profile that is exported


class Explorer:
    """Widgets over one profile. Show `panel` where there is a browser, call `static` where there is none.

    `machines` maps a name to its ceilings, the first one is chosen. Whatever goes wrong is one sentence in the panel.
    """

    def __init__(self, profile: str, language: str, machines: dict[str, Machine]) -> None:
        self._language = prose.languages(language)[0]
        self._parameters = SimpleNamespace(**params.load(profile))
        self._source = models.resolve(self._parameters.model, self._parameters.model_revision)
        self._models = {self._source.name: cost.architecture(models.outline(self._source).config)}
        self._models |= cost.known_models()
        self._machines, self._picture = machines, choice.Picture(self._language, self._lengths())
        self._stop, self._worker = threading.Event(), None
        self._controls = self._make_controls()
        self._numbers, self._said = ipywidgets.HTML(), ipywidgets.HTML()
        self._chart, self._race = ipywidgets.Image(format="png"), ipywidgets.Image(format="png")
        self._chart.layout.width = self._race.layout.width = f"{choice.WIDTH_PIXELS}px"  # sharp: not scaled
        self._race.layout.display = "none"
        actions = {"measure": self._measure, "watch": self._watch, "stop": self._end, "export": self._export}
        self._buttons = {name: self._button(name, action) for name, action in actions.items()}
        self._buttons["stop"].disabled = True
        self._measured = self._recorded()
        self.move()

    # --- what is shown

    def panel(self) -> ipywidgets.Widget:
        """The whole thing as one widget."""
        wrap = {"flex_flow": "row wrap"}
        buttons = ipywidgets.HBox(list(self._buttons.values()))
        parts = [ipywidgets.HBox(list(self._controls.values()), layout=wrap), buttons, self._said]
        pictures = ipywidgets.VBox([self._chart, self._race])
        return ipywidgets.VBox([*parts, ipywidgets.HBox([self._numbers, pictures], layout=wrap)])

    def static(self) -> None:
        """What the panel shows at first, as plain outputs."""
        display(HTML(self._numbers.value), Image(self._chart.value))

    def move(self, *_) -> None:
        """Predict anew for what the controls say."""
        try:
            chosen = self.chosen()
            self._numbers.value = choice.table(chosen, self._language)
            self._chart.value = self._picture.draw(chosen, self._on_chart())
            if self._buttons["stop"].disabled:  # nothing runs: what was said was about another choice
                self._said.value = ""
        except ValueError as error:  # such as a precision whose speed this machine's records do not hold
            self._say("failed", reason=str(error))

    def chosen(self) -> choice.Choice:
        value = {name: control.value for name, control in self._controls.items()}
        asked = {name: value[name] for name in ("context", "output_tokens", "batch", "dtype", "attention")}
        case = Case(self._models[value["model"]], kv_dtype=value["kv_dtype"], **asked)
        return choice.Choice(self._machines[value["machine"]], case)

    def _make_controls(self) -> dict[str, ipywidgets.Widget]:
        p, slider, choose = self._parameters, ipywidgets.SelectionSlider, ipywidgets.Dropdown
        middle = sorted(p.context_lengths)[len(p.context_lengths) // 2]
        lengths = sorted({*self._lengths(), *p.context_lengths})
        made = {
            "context": slider(options=lengths, value=middle),
            "output_tokens": slider(options=sorted({*OUTPUTS, p.output_tokens}), value=p.output_tokens),
            "batch": slider(options=[1, 2, 4, 8, 16, 32, 64], value=1),
            "model": choose(options=list(self._models)),
            "machine": choose(options=list(self._machines)),
            "dtype": choose(options=["float32", "bfloat16", "float16"], value=p.dtype),
            "kv_dtype": choose(options=["float32", "bfloat16", "float16", "float8"], value=p.dtype),
            "attention": choose(options=list(params.CHOICES["attention_kernels"]), value=p.attention_kernels[-1]),
        }
        for name, control in made.items():
            control.description = prose.plain(f"explore.{name}", self._language)
            control.style = {"description_width": "9em"}
            control.observe(self.move, names="value")
        return made

    def _lengths(self) -> list[int]:
        most = models.outline(self._source).max_positions
        return [n for n in LENGTHS if n <= most]

    def _button(self, name: str, action) -> ipywidgets.Button:
        button = ipywidgets.Button(description=prose.plain(f"explore.{name}_button", self._language))
        button.on_click(lambda _: action())
        return button

    def _say(self, key: str, **numbers) -> None:
        self._said.value = f"<p>{prose.text(f'explore.{key}', self._language, **numbers)}</p>"

    # --- what is measured

    def _point(self) -> dict:
        case = self.chosen().case
        asked = SimpleNamespace(**vars(self._parameters) | {"batch_size": case.batch, "dtype": case.dtype})
        return sweep.on_off_point(asked, case.attention, case.context, case.output_tokens)

    def _on_chart(self) -> pd.DataFrame:
        """Recorded points that are about the chosen model, precision, kernel and batch."""
        case, rows = self.chosen().case, self._measured
        if case.model != self._models[self._source.name] or case.dtype != self._parameters.dtype:
            return rows.iloc[:0]
        return rows[(rows["attention"] == case.attention) & (rows["batch_size"] == case.batch)]

    def _recorded(self) -> pd.DataFrame:
        """Every S1b pair of this profile that this environment recorded."""
        run = sweep.Run(self._parameters.profile, provenance.environment())
        found = summary.generations(run.store("s1b").load())
        return found[(found["status"] == "ok") & ~found["control"].astype(bool)]

    def _measure(self) -> None:
        """Measure the chosen point for real, in the background, and keep its records."""
        self._in_background(self._measured_pair, self._point())

    def _measured_pair(self, point: dict) -> None:
        p = self._parameters
        self._say("loading")
        with report.exclusive(p.profile), Worker(self._source, point["dtype"], p.device, p.threads, p.seed) as worker:
            self._worker = worker
            run = sweep.begin(p, provenance.environment())
            repetition = 1 + max((r["repetition"] for r in run.records("s1b", [(point, 1)])), default=0)
            self._say("measuring", context_length=point["context_length"], output_tokens=point["output_tokens"])
            records = [] if self._stop.is_set() else worker.measure_pair(point, repetition)
            if self._stop.is_set():
                return self._say("stopped")
            report.mark_stale(p.profile)
            sweep.keep(run.store("s1b"), records)
        self._measured = self._recorded()
        self.move()
        failed = next((r for r in records if r["status"] != "ok"), None)
        if failed:
            return self._say("failed", reason=failed["reason"])
        pair = summary.pairs(run.store("s1b").load()).iloc[-1]
        self._say("measured", tpot_speedup=pair["tpot_speedup"], total_speedup=pair["total_speedup"])

    def _watch(self) -> None:
        """Generate with the cache and without it in this kernel, and draw every token as it comes; records nothing."""
        self._in_background(self._raced, self.chosen().case)

    def _raced(self, case: Case) -> None:
        from kvlab import prompts, weights  # torch, seconds to load
        from kvlab.measure import live

        p, arrivals, drawn_s = self._parameters, {}, [0.0]
        self._say("loading")
        model = weights.load(self._source, case.dtype, p.device, case.attention)
        race = Race(self._language, case.context, case.output_tokens)
        prompt = prompts.token_ids(case.context, p.seed, 0, model.config.get_text_config().vocab_size)

        def came(at_s: float) -> None:
            arrivals[use_cache].append(at_s)
            if self._stop.is_set():
                raise InterruptedError
            if time.monotonic() - drawn_s[0] > REDRAW_S:
                self._race.value, drawn_s[0] = race.draw(arrivals), time.monotonic()

        self._race.layout.display = ""
        for use_cache in (True, False):
            arrivals[use_cache] = []
            self._say("watching_cache" if use_cache else "watching_no_cache")
            live.watch(model, prompt, case.output_tokens, use_cache, came)
        self._race.value = race.draw(arrivals)
        self._say("watched", ratio=arrivals[False][-1] / arrivals[True][-1])

    def _in_background(self, work, *arguments) -> None:
        """Run `work` on the loaded model in a thread: the kernel stays free for moves and for the stop button."""
        if self._controls["model"].value != self._source.name:
            return self._say("other_model", model=self._source.name)
        self._stop.clear()
        self._busy(True)

        def run() -> None:
            try:
                work(*arguments)
            except Exception as error:  # the panel's border: one sentence, and the panel lives on
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self._say("stopped") if self._stop.is_set() else self._say("failed", reason=reason)
            finally:
                self._worker = None
                self._busy(False)

        threading.Thread(target=run, daemon=True).start()

    def _busy(self, busy: bool) -> None:
        for name, button in self._buttons.items():
            button.disabled = busy != (name == "stop")

    def _end(self) -> None:
        self._stop.set()
        if self._worker:
            self._worker.stop()

    # --- what is taken home

    def _export(self) -> None:
        """Write params/mine.yaml: this profile with the chosen context length among its own, and the chosen output."""
        given = yaml.safe_load(params.profile_path(self._parameters.profile).read_text(encoding="utf-8"))
        case = self.chosen().case
        lengths = sorted({*self._parameters.context_lengths, case.context})
        asked = given | {"context_lengths": lengths, "output_tokens": case.output_tokens}
        text = yaml.safe_dump(asked, sort_keys=False, default_flow_style=None)
        paths.replace(paths.PARAMS / f"{MINE}.yaml", text)
        self._say("exported", lengths=", ".join(map(str, lengths)), output_tokens=case.output_tokens)


def machines(profile: str) -> dict[str, Machine]:
    """This profile's machine first, then every other recorded one by its profile's name, then known cards."""
    recorded = sorted(path.parent.name for path in paths.results("").glob("*/predictions.jsonl"))
    names = [name for name in (profile, *recorded) if name in recorded]
    return {name: whatif.calibration(name).machine for name in (*names, *published.known_machines())}
