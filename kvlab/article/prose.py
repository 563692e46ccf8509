"""Sentences in two languages: a table per language, with numbers filled in and formatted for people."""

import functools
import html
import math
import re
import string
from pathlib import Path

import yaml
from IPython.display import display
from markupsafe import Markup

LANGUAGES = ("zh", "en")
TEXTS = Path(__file__).parent / "text"
TABLES = yaml.safe_load((TEXTS.parent / "tables.yaml").read_bytes())  # name -> {row entry: "text.key[:unit]"}
WORDS = {  # entries that are no part of a text's key
    "arm": {True: "label.cache", False: "label.no_cache"},
    "checks": {True: "checks.yes", False: "checks.no", None: "checks.unknown"},
}
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
UNIT_SPACE = re.compile(r"(?<=\d) (?=[^\W\d]|%)|(?<=\bn) (?==)|(?<==) (?=\d)")  # where no line may break
ACTIVE_SIGNS = re.compile(r"[&<>\"'\\`*_\[\]|~#$!]")  # of HTML and of Markdown


def languages(language):
    """The languages to emit for a notebook's `language` parameter: "zh", "en" or "both"."""
    if language not in (*LANGUAGES, "both"):
        raise ValueError(f'language is "{language}"; use "zh", "en" or "both"')
    return LANGUAGES if language == "both" else (language,)


@functools.cache
def table_of(language):
    """All strings of one language as {"charts.tpot_by_context.title": "..."}, from every file in text/."""
    files = sorted(TEXTS.glob(f"*.{language}.yaml"))
    trees = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in files]
    return {key: text for tree in trees for key, text in _flatten(tree, "")}


def _flatten(tree, prefix):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def scale(value, unit):
    """(divisor, symbol) that suits this size: scale(0.0331, "s") is (0.001, "ms")."""
    steps = {"s": TIME_UNITS, "B": BYTE_UNITS}.get(unit)
    if steps is None:
        return {"%": (0.01, "%")}.get(unit, (1.0, ""))
    size = _round(abs(value), 2 if unit == "s" else 3)
    fallback = steps[-1] if size else (1, unit)
    return next((step for step in steps if size >= step[0]), fallback)


def _round(value, digits):
    return float(f"{value:.{digits}g}") if value else 0.0


def _decimals(number, unit):
    """Decimals a reader can use: 9.2 s, 33 ms, 1.02x, 15.3x, 142x, 22.5 MiB."""
    if unit == "count" or number == 0 or (unit == "B" and number == int(number)):
        return 0
    if unit == "x" and abs(number) < 1.995:
        return 2
    significant = {"s": 2, "%": 2}.get(unit, 3)
    decimals = significant - 1 - math.floor(math.log10(abs(_round(number, significant))))
    return max(0, min(1 if unit == "x" else decimals, decimals))


def _with_unit(number, symbol, unit, language):
    if unit in ("x", "rate"):
        return plain("unit.ratio" if unit == "x" else "unit.rate", language, number=number)
    return f"{number} {symbol}".rstrip()


def friendly(value, unit="", language="en"):
    """A number for people; units: s, B, x (ratio), % (of a value 0..1), rate (tokens/s), count or none."""
    if value is None or not math.isfinite(value):
        return table_of(language)["interval.absent"]
    divisor, symbol = scale(value, unit)
    number = value / divisor
    return _with_unit(f"{number:,.{_decimals(number, unit)}f}", symbol, unit, language)


def friendly_interval(estimate, unit, language="en"):
    """ "5.2x (95 % interval 5.0 to 5.4, n = 6)" from anything with n, median, low, high (and stable)."""
    median, n = friendly(estimate.median, unit, language), str(int(estimate.n))
    if any(end is None or not math.isfinite(end) for end in (estimate.median, estimate.low, estimate.high)):
        text = plain("interval.short", language, median=median, n=n)
    else:
        low, high = _ends(estimate, unit)
        text = plain("interval.full", language, median=median, low=low, high=high, n=n)
    stability = getattr(estimate, "stable", "ok")
    return text if stability == "ok" else plain(f"interval.{stability}", language, text=text)


def _ends(estimate, unit):
    """Both ends on the median's scale, with up to two more decimals where it takes them to differ."""
    divisor, _ = scale(estimate.median, unit)
    fewest = _decimals(estimate.median / divisor, unit)
    for decimals in range(fewest, fewest + 3):
        ends = [f"{end / divisor:,.{decimals}f}" for end in (estimate.low, estimate.high)]
        if ends[0] != ends[1]:
            break
    return ends


def _in_language(value, unit, language):
    if isinstance(value, dict):
        value = value[language]
    if isinstance(value, str):
        return value
    if hasattr(value, "median") and hasattr(value, "low"):
        return friendly_interval(value, unit, language)
    return friendly(value, unit, language)


class _Sentence(string.Formatter):
    """Fills {name:unit}; `finish` decides how a filled-in value is marked up."""

    def __init__(self, language, finish):
        self.language, self.finish = language, finish

    def get_value(self, key, args, numbers):
        if key not in numbers:
            raise KeyError(f'the sentence needs "{key}"; it was given {sorted(numbers)}')
        return numbers[key]

    def format_field(self, value, unit):
        is_number = not isinstance(value, (str, dict))
        return self.finish(_in_language(value, unit, self.language), is_number)


def _template(key, language):
    try:
        return table_of(language)[key]
    except KeyError:
        raise KeyError(f'no text in {language} for "{key}"') from None


def plain(key, language, **numbers):
    """The sentence as bare text, for chart labels and alternative texts: escape it before it enters HTML."""
    sentence = _Sentence(language, lambda text, is_number: str(text))
    return sentence.vformat(_template(key, language), (), numbers)


def escape(text):
    """Markup that shows `text` literally in HTML and in Markdown; markup passes through."""
    if isinstance(text, Markup):
        return text
    return Markup(ACTIVE_SIGNS.sub(lambda sign: f"&#{ord(sign[0])};", str(text)))


def text(key, language, *, source=None, **numbers):
    """The sentence as Markdown: values escaped, numbers marked with the `source` they came from.

    A value is a number, an estimate (n, median, low, high), a string, or {"zh": ..., "en": ...}.
    """

    def finish(value, is_number):
        if not is_number:
            return escape(value)
        number = escape(UNIT_SPACE.sub("\u00a0", value))
        marked = Markup('<span class="number" title="{}">{}</span>')
        return marked.format(source, number) if source else number

    return Markup(_Sentence(language, finish).vformat(_template(key, language), (), numbers))


def both(key, **numbers):
    """The sentence in every language, to be filled into another one or into a table."""
    return {language: text(key, language, **numbers) for language in LANGUAGES}


def emit(data, language, **tags):
    """Displays one output that the page keeps for one language only."""
    display(data, raw=True, metadata={"kvlab": {"language": language, **tags}})


def say(key, language="both", *, source=None, **numbers):
    """Displays the sentence, once per language."""
    for each in languages(language):
        sentence = text(key, each, source=source, **numbers)
        bare = html.unescape(re.sub(r"<[^>]+>", "", sentence))
        emit({"text/markdown": str(sentence), "text/plain": bare}, each)


def table(rows, headings, language="both", *, source=None):
    """Displays a table; rows are dicts or a data frame, `headings` is {column: "text.key[:unit]"} or one of TABLES.

    Without rows it says that there is no data.
    """
    rows = rows.to_dict("records") if hasattr(rows, "to_dict") else list(rows)
    if not rows:
        say("status.no_data", language)
    for each in languages(language) if rows else ():
        emit({"text/html": html_table(rows, headings, each, source)}, each)


def html_table(rows, headings, language, source):
    headings = TABLES[headings] if isinstance(headings, str) else headings
    columns = [(column, *f"{key}:".split(":")[:2]) for column, key in headings.items()]
    head = "".join(f'<th scope="col">{escape(plain(key, language))}</th>' for _, key, _ in columns)
    cells = [[_cell(row.get(column), unit, language, source) for column, _, unit in columns] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value, unit, language, source):
    group = unit.removeprefix("@")
    if group != unit:
        value = text(WORDS.get(group, {}).get(value, f"{group}.{value}"), language)
    if not isinstance(value, (str, dict)) and value is not None:
        title = f' title="{html.escape(source)}"' if source else ""
        shown = UNIT_SPACE.sub("\u00a0", _in_language(value, unit, language))
        return f'<td class="number"{title}>{escape(shown)}</td>'
    return f"<td>{'' if value is None else escape(_in_language(value, unit, language))}</td>"


def glossary(language="both"):
    """Displays the glossary as a definition list, once per language."""
    terms = [key.split(".")[1] for key in table_of("en") if re.fullmatch(r"glossary\.\w+\.name", key)]
    for each in languages(language):
        entries = "".join(
            f"<dt>{escape(plain(f'glossary.{term}.name', each))}</dt>"
            f"<dd>{escape(plain(f'glossary.{term}.text', each))}</dd>"
            for term in terms
        )
        emit({"text/html": f'<dl class="glossary">{entries}</dl>'}, each)
