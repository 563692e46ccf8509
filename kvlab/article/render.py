"""Executed notebooks to one self-contained HTML page per language."""

import copy
import re
from pathlib import Path
from urllib.parse import quote

import nbformat
from bs4 import BeautifulSoup
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbconvert.filters import strip_ansi

from kvlab.article import prose

PAGE = Path(__file__).parent / "page"
LANG = {"zh": "zh-CN", "en": "en"}
STREAM_LINES = 20  # a cell keeps its last lines of output
SVG_LIMIT_BYTES = 250_000  # a larger drawing enters the page as PNG
MACHINE_PATH = re.compile(r"(?<![\w:/.<])(?:/[\w.@+~-]+)+/(?=[\w.@+~-])")
PERCENT, BAR = r"\d{1,3}(\.\d+)?\s?%", r"[\s\[\]|█━#=>.-]*"
PROGRESS = re.compile(rf"{PERCENT}\s*[|\[━█#]|^{BAR}{PERCENT}{BAR}$")
OBJECT_TEXT = re.compile(r"^<[\w.]+ (size|object|at 0x)|^[A-Z]\w*\(children=|^\w*(Progress|Slider|Box)\(")
FURNITURE_TAGS = {"papermill-error-cell-tag", "injected-parameters"}
URI_SAFE = ' "/:;=,()+!*@[]{}$|?'  # read as they are in a data URI, and in an attribute within single quotes
KEPT_DATA = ("image/svg+xml", "image/png", "text/html", "text/markdown", "text/plain")


# --- one language of an executed notebook


def split(notebook, language):
    """A copy in one language: its cells and outputs and the untagged ones, no debris, no machine paths."""
    page = copy.deepcopy(notebook)
    injected = [cell.source for cell in page.cells if "injected-parameters" in _tags(cell)]
    page.cells = [_clean(cell, language, injected) for cell in page.cells if _wanted(cell, language)]
    page.metadata = nbformat.from_dict(
        {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
            "kvlab": {"language": language},
        }
    )
    return page


def _tags(cell):
    return set(cell.metadata.get("tags", []))


def _wanted(cell, language):
    spoken = _tags(cell) & set(prose.LANGUAGES)
    return (not spoken or language in spoken) and not _tags(cell) & FURNITURE_TAGS


def _clean(cell, language, injected):
    if cell.cell_type == "code":
        cell.outputs = _outputs(cell.outputs, language)
        if "parameters" in _tags(cell):  # the values that were used stand below the defaults, in one cell
            cell.source = without_machine_paths("\n\n".join([cell.source, *injected]))
    cell.metadata = nbformat.from_dict({"tags": sorted(_tags(cell))} if _tags(cell) else {})
    return cell


def _outputs(outputs, language):
    kept = [output for output in outputs if _spoken(output, language)]
    stream = [output.text for output in kept if output.output_type == "stream" and output.name == "stdout"]
    kept = [cleaned for output in kept if output.output_type != "stream" and (cleaned := _output(output))]
    text = stdout_text("".join(stream), language)
    return ([nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []) + kept


def _spoken(output, language):
    return output.get("metadata", {}).get("kvlab", {}).get("language", language) == language


def _output(output):
    """The output without what a page cannot show; None when nothing is left."""
    if output.output_type == "error":
        output.evalue = without_machine_paths(strip_ansi(output.evalue))
        output.traceback = [without_machine_paths(strip_ansi(line)) for line in output.traceback]
        return output
    data = output.data
    widget = any("widget" in mimetype for mimetype in data)
    output.data = {mimetype: data[mimetype] for mimetype in KEPT_DATA if mimetype in data}
    if "text/plain" in output.data:
        output.data["text/plain"] = without_machine_paths(output.data["text/plain"])
    bare = set(output.data) <= {"text/plain"}
    if widget or not output.data or (bare and OBJECT_TEXT.match(output.data["text/plain"])):
        return None
    return output


def stdout_text(text, language):
    """What a terminal would show in the end: carriage returns obeyed, no progress frames, last lines only."""
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in strip_ansi(text).split("\n")]
    lines = [without_machine_paths(line) for line in lines if line.strip() and not PROGRESS.search(line)]
    if len(lines) > STREAM_LINES:
        left_out = prose.plain("page.truncated", language, lines=len(lines) - STREAM_LINES + 1)
        lines = [left_out, *lines[1 - STREAM_LINES :]]
    return "".join(f"{line}\n" for line in lines)


def without_machine_paths(text):
    """/home/me/lab/kvlab/sweep.py becomes sweep.py."""
    return MACHINE_PATH.sub("", text)


# --- the page


def page(notebooks, language, title="", *, provenance=None, warnings=(), other_language_href=None):
    """One HTML document that needs nothing but itself.

    `provenance` is {name: value}, `warnings` are sentences; a failed cell adds its own. Without `title`
    the first notebook's first heading is the page's title.
    """
    cells = [cell for each in notebooks for cell in split(each, language).cells]
    cells = _joined(sorted(cells, key=lambda cell: "closing" in _tags(cell)))  # limits and reruns end the page
    title = title or _take_title(cells)
    other = next(each for each in prose.LANGUAGES if each != language)
    for output in _all_outputs(cells):
        _add_source_line(output, language)
    words = ("skip", "contents", "code", "other_language", "warnings", "provenance", "error")
    resources = {
        "lang": LANG[language],
        "other_lang": LANG[other],
        "other_language_href": other_language_href or f"article.{other}.html",
        "title": title,
        "words": {key: prose.plain(f"page.{key}", language) for key in words},
        "warnings": [*warnings, *_failures(cells, language)],
        "provenance": list((provenance or {}).items()),
        "css": (PAGE / "page.css").read_text(encoding="utf-8"),
        "js": (PAGE / "page.js").read_text(encoding="utf-8"),
    }
    article = nbformat.v4.new_notebook(cells=cells)
    document, _ = _exporter().from_notebook_node(article, resources={"page": resources})
    return _finish(document, language)


def with_warning(document, key, language):
    """The document with one more sentence on top; as it is when the sentence stands there already."""
    sentence = prose.plain(key, language)
    found = BeautifulSoup(document, "html.parser")
    main = found.find("main")
    if main is None or sentence in main.get_text():
        return document
    note = found.new_tag("div", attrs={"class": "warnings", "role": "note"})
    note.append(found.new_tag("p"))
    note.p.string = sentence
    main.insert(0, note)
    return str(found)


def _take_title(cells):
    """Removes the first cell's level-one heading and returns its text."""
    if cells and (found := re.match(r"\s*# +(.+)\n?", cells[0].source)):
        cells[0].source = cells[0].source[found.end() :]
        return found[1].strip()
    return "kvlab"


def _all_outputs(cells):
    return [output for cell in cells for output in cell.get("outputs", [])]


def _failures(cells, language):
    """A warning for each cell that failed, so that an incomplete page says so on top."""
    failed = [output for output in _all_outputs(cells) if output.output_type == "error"]
    return [prose.plain("page.failed", language, reason=f"{each.ename}: {each.evalue}") for each in failed]


def _joined(cells):
    """Code that shows nothing moves to the top of the code that follows it, so that one fold holds both."""
    joined = []
    for cell in cells:
        last = joined[-1] if joined else None
        if last and last.cell_type == cell.cell_type == "code" and not last.outputs:
            cell.source = f"{last.source}\n\n{cell.source}"
            joined.pop()
        joined.append(cell)
    return joined


def _exporter():
    folders = [str(PAGE.parent)]
    exporter = HTMLExporter(template_name="page", extra_template_basedirs=folders, exclude_anchor_links=True)
    exporter.register_filter("image_uri", image_uri)
    return exporter


def _add_source_line(output, language):
    tags = output.get("metadata", {}).get("kvlab", {})
    if tags.get("source"):
        tags["source_line"] = prose.plain("page.source", language, source=tags["source"])


def image_uri(data):
    """The picture as a data URI: the drawing where it is small enough, else the PNG."""
    svg = "".join(data.get("image/svg+xml", ""))
    if svg and (len(svg.encode()) <= SVG_LIMIT_BYTES or "image/png" not in data):
        return "data:image/svg+xml;charset=utf-8," + quote(" ".join(svg.split()), safe=URI_SAFE)  # a sixth below base64
    return "data:image/png;base64," + "".join(data["image/png"].split())


def _finish(document, language):
    """Numbers figures, settles headings, fills the contents, and lets nothing reach for the net."""
    soup = BeautifulSoup(document, "html.parser")
    main = soup.find("main")
    for element in main.find_all(["script", "link", "iframe", "object", "embed", "style"]):
        element.decompose()
    for image in main.find_all("img"):
        if not image.get("src", "").startswith("data:"):
            image.replace_with(image.get("alt", ""))
    _number_figures(soup, main, language)
    headings = _settle_headings(soup, main, language)
    _make_tables_scroll(soup, main)
    soup.find(id="toc").details.append(_contents([*headings, *soup.select("footer h2")]))
    return str(soup)


def _unique(identifier, taken):
    number, candidate = 1, identifier
    while candidate in taken:
        number += 1
        candidate = f"{identifier}-{number}"
    taken.add(candidate)
    return candidate


def _anchor(soup, identifier, label):
    anchor = soup.new_tag("a", attrs={"class": "anchor", "href": f"#{identifier}", "aria-label": label})
    anchor.string = "#"
    return anchor


def _number_figures(soup, main, language):
    taken, word = set(), prose.plain("page.figure", language)
    for number, figure in enumerate(main.find_all("figure"), start=1):
        figure["id"] = _unique(figure.get("id", f"fig-{number}"), taken)
        label = soup.new_tag("strong")
        label.string = f"{word} {number}. " if language == "en" else f"{word} {number}　"
        figure.figcaption.insert(0, label)
        figure.figcaption.append(_anchor(soup, figure["id"], f"{word} {number}"))
        image = figure.img
        image["alt"] = image.get("alt") or f"{word} {number}"


def _settle_headings(soup, main, language):
    """The page's title is the only h1: where notebooks have one, all move down; no level is skipped."""
    headings = main.find_all(re.compile("^h[1-6]$"))
    down, level = int(any(heading.name == "h1" for heading in headings)), 1
    taken = {"article", "toc", "provenance"}
    for heading in headings:
        level = min(int(heading.name[1]) + down, level + 1, 6)
        heading.name = f"h{level}"
        text = heading.get_text().strip()
        heading["id"] = _unique(re.sub(r"[^\w]+", "-", text.lower()).strip("-") or "section", taken)
        heading.append(_anchor(soup, heading["id"], f"{prose.plain('page.anchor', language)}: {text}"))
    return headings


def _make_tables_scroll(soup, main):
    for table in main.find_all("table"):
        for cell in table.select("thead th"):
            cell["scope"] = "col"
        table.wrap(soup.new_tag("div", attrs={"class": "scroll", "tabindex": "0"}))
    for block in main.find_all("pre"):
        block["tabindex"] = "0"


def _contents(headings):
    """A list of the sections (h2) with their parts (h3)."""
    sections = []
    for heading in headings:
        text = heading.get_text().removesuffix("#").strip()
        link = Markup('<a href="#{}">{}</a>').format(heading["id"], text)
        if heading.name == "h2" or heading.name == "h3" and not sections:
            sections.append((link, []))
        elif heading.name == "h3":
            sections[-1][1].append(Markup("<li>{}</li>").format(link))
    parts = [f"<li>{link}{'<ol>' + ''.join(within) + '</ol>' if within else ''}</li>" for link, within in sections]
    return BeautifulSoup(f"<ol>{''.join(parts)}</ol>", "html.parser")
