"""The page: one language, self-contained, no debris, sound for screen readers, drawn by a real browser."""

import re
from base64 import b64encode
from urllib.parse import unquote
from xml.etree import ElementTree

import fake_frames
import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from kvlab.article import charts, prose, render

TRACEBACK = [
    "\x1b[0;31mFileNotFoundError\x1b[0m",
    "File /home/me/lab/kvlab/sweep.py:12",
    "no /home/me/lab/none.json",
]
BARS = "".join(f"\r{done:3d}%|{'#' * (done // 10)}| {done}/100 [00:01<00:02]" for done in range(0, 101, 5))


def said(text, language):
    return new_output("display_data", {"text/markdown": text}, metadata={"kvlab": {"language": language}})


def first_notebook(chart_outputs=()):
    """What papermill leaves behind, with every kind of debris."""
    widget = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "1"},
        "text/plain": "HBox(children=(1,))",
    }
    noisy = [
        new_output("stream", name="stdout", text=BARS + "\nrecords in /home/me/lab/results/s1b.jsonl\n"),
        new_output("stream", name="stdout", text="".join(f"line {index}\n" for index in range(100))),
        new_output("display_data", widget),
        new_output("execute_result", {"text/plain": "<Figure size 640x480 with 1 Axes>"}),
        new_output(
            "display_data", {"text/html": '<script src="https://cdn.example/x.js"></script><b>kept</b>'}
        ),
    ]
    cells = [
        new_markdown_cell("# 标题：缓存\n\n导语。", metadata={"tags": ["zh"]}),
        new_markdown_cell("# Title: the cache\n\nIntroduction.", metadata={"tags": ["en"]}),
        new_code_cell("context_lengths = [128]  # tokens", metadata={"tags": ["parameters"]}),
        new_code_cell(
            '# Parameters\ncontext_lengths = [256]\nfolder = "/home/me/lab/results"\nbase_url = "http://127.0.0.1:8000"',
            metadata={"tags": ["injected-parameters"]},
        ),
        new_code_cell(
            "say()", outputs=[said("中文句子 **一**", "zh"), said("English sentence **one**", "en")]
        ),
        new_code_cell("charts.show()", outputs=list(chart_outputs)),
        new_markdown_cell("## Shared part\n\n![remote](https://example.org/x.png) ![local](figures/x.png)"),
        new_markdown_cell("#### Skipped levels\n\n| a | b |\n|---|---|\n| 1 | 2 |"),
        new_code_cell("noisy()", outputs=noisy),
        new_code_cell("warn()", outputs=[new_output("stream", name="stderr", text="secret noise\n")]),
    ]
    return numbered(new_notebook(cells=cells, metadata={"papermill": {"input_path": "/home/me/in.ipynb"}}))


def failed_notebook():
    error = new_output(
        "error", ename="FileNotFoundError", evalue="/home/me/lab/none.json", traceback=TRACEBACK
    )
    return numbered(
        new_notebook(cells=[new_markdown_cell("## Fails"), new_code_cell("open(x)", outputs=[error])])
    )


def numbered(notebook):
    for number, cell in enumerate(notebook.cells, start=1):
        cell.metadata["papermill"] = {"duration": 1.0}
        if cell.cell_type == "code":
            cell.execution_count = number
    return notebook


@pytest.fixture(scope="module")
def chart_outputs(tmp_path_factory):
    """Two real charts with their sentences, as a notebook would hold them."""
    outputs, real = [], prose.display
    prose.display = lambda data, raw, metadata: outputs.append((data, metadata))
    try:
        for name in ("mechanism", "tpot_by_context"):
            frames, folder = fake_frames.frames_of(name), tmp_path_factory.mktemp("figures")
            charts.show(name, getattr(charts, name), *frames, figures_dir=folder, source=fake_frames.SOURCE)
    finally:
        prose.display = real
    return [new_output("display_data", as_stored(data), metadata=metadata) for data, metadata in outputs]


def as_stored(data):
    """Pictures as a kernel stores them: PNG in base64."""
    return {
        kind: b64encode(value).decode() if isinstance(value, bytes) else value for kind, value in data.items()
    }


@pytest.fixture(scope="module")
def documents(chart_outputs):
    notebooks = [first_notebook(chart_outputs), failed_notebook()]
    provenance = {"model": "<script>alert(1)</script>", "commit": "0123abcd"}
    return {
        language: render.page(notebooks, language, provenance=provenance, warnings=["Stale <page>"])
        for language in prose.LANGUAGES
    }


@pytest.fixture(scope="module", params=prose.LANGUAGES)
def language(request):
    return request.param


@pytest.fixture
def page(documents, language):
    return BeautifulSoup(documents[language], "html.parser")


def everything(notebook):
    return nbformat.writes(notebook)


# --- split


def test_split_keeps_one_language_and_what_has_none(chart_outputs):
    zh, en = (everything(render.split(first_notebook(chart_outputs), each)) for each in prose.LANGUAGES)
    assert "中文句子" in zh and "English sentence" not in zh and "Introduction" not in zh
    assert "English sentence" in en and not re.search(r"[\u4e00-\u9fff]", en)
    assert "Shared part" in zh and "Shared part" in en


def test_split_leaves_the_executed_notebook_alone():
    notebook = first_notebook()
    before = everything(notebook)
    render.split(notebook, "zh")
    assert everything(notebook) == before


def test_br_47_split_drops_debris_and_machine_paths():
    part = render.split(first_notebook(), "en")
    text = everything(part)
    for debris in ("stderr", "secret noise", "widget-view", "HBox", "<Figure", "/home/me", "papermill", "%|"):
        assert debris not in text, debris
    streams = [
        output for cell in part.cells for output in cell.get("outputs", []) if output.output_type == "stream"
    ]
    assert [stream.text.count("\n") for stream in streams] == [render.STREAM_LINES]
    assert "line 99" in streams[0].text and "earlier lines left out" in streams[0].text
    assert part.metadata.kernelspec.name == "python3"
    nbformat.validate(part)


def test_br_47_carriage_returns_are_obeyed():
    assert (
        render.stdout_text("10 %\r20 %\rdone\n" + BARS + "\nsaved 5 % of it\n", "en")
        == "done\nsaved 5 % of it\n"
    )


def test_used_parameters_stand_below_the_defaults():
    source = render.split(first_notebook(), "en").cells[1].source
    assert source.index("[128]") < source.index("[256]")
    assert 'folder = "results"' in source and "http://127.0.0.1:8000" in source


def test_split_twice_is_split_once(chart_outputs):
    once = render.split(first_notebook(chart_outputs), "zh")
    assert everything(render.split(once, "zh")) == everything(once)


# --- the page as a document


def test_br_49_nothing_is_fetched(page, documents, language):
    for element in page.find_all(src=True):
        assert element["src"].startswith("data:")
    assert all(element["href"].startswith("data:") for element in page.find_all("link"))
    assert not page.find_all(["iframe", "object", "embed"]) and not page.find("script", src=True)
    styles = "".join(style.string for style in page.find_all("style"))
    assert "@import" not in styles and "url(" not in styles
    assert len(documents[language]) < 3_000_000


def test_every_picture_has_words(page):
    pictures = page.find_all("img")
    assert len(pictures) == 2 and all(len(picture["alt"]) > 30 for picture in pictures)
    assert "2,048" in pictures[1]["alt"]


def test_every_drawing_reaches_the_page_whole(page):
    for picture in page.find_all("img"):
        kind, _, content = picture["src"].partition(",")
        drawing = ElementTree.fromstring(unquote(content))
        assert kind.startswith("data:image/svg+xml") and drawing.tag.endswith("svg") and len(drawing)


def test_figures_are_numbered_anchored_and_sourced(page, language):
    figures = page.find_all("figure")
    assert [figure["id"] for figure in figures] == ["fig-mechanism", "fig-tpot_by_context"]
    word = prose.plain("page.figure", language)
    assert [figure.figcaption.strong.get_text()[: len(word) + 2] for figure in figures] == [
        f"{word} 1",
        f"{word} 2",
    ]
    assert fake_frames.SOURCE in figures[1].figcaption.get_text()


def test_headings_are_sound(page, language):
    levels = [int(heading.name[1]) for heading in page.find_all(re.compile("^h[1-6]$"))]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(deeper - level <= 1 for level, deeper in zip(levels, levels[1:], strict=False))
    assert page.h1.get_text() == {"zh": "标题：缓存", "en": "Title: the cache"}[language]


def test_every_anchor_is_reached_and_no_id_stands_twice(page):
    ids = [element["id"] for element in page.find_all(id=True)]
    assert len(ids) == len(set(ids))
    anchors = [link["href"][1:] for link in page.find_all("a", href=re.compile("^#"))]
    assert set(anchors) <= set(ids)
    contents = [link.get_text() for link in page.select("#toc a")]
    assert contents[:3] == ["Shared part", "Skipped levels", "Fails"] and len(contents) == 4
    assert page.find("a", class_="skip")["href"] == f"#{page.main['id']}"


def test_the_language_is_declared_and_the_other_one_linked(page, language):
    assert page.html["lang"] == render.LANG[language]
    link = page.find("a", class_="language")
    other = "en" if language == "zh" else "zh"
    assert link["href"] == f"article.{other}.html" and link["hreflang"] == render.LANG[other]


def test_the_page_says_on_top_what_is_wrong(page):
    items = [item.get_text() for item in page.select("main > .warnings li")]
    assert items[0] == "Stale <page>" and "FileNotFoundError: none.json" in items[1] and len(items) == 2


def test_an_error_is_one_readable_block_without_paths(page):
    (block,) = page.select(".error")
    assert block.strong.get_text() == "FileNotFoundError" and block.pre and "\x1b" not in block.get_text()
    assert "/home/me" not in str(page)


def test_hostile_text_stays_text(page):
    assert "<script>alert(1)</script>" in page.footer.get_text()
    assert len(page.find_all("script")) == 1 and "kept" in page.main.get_text()


def test_code_is_folded_but_there(page):
    folds = page.select("details.code")
    assert folds and not any(fold.has_attr("open") for fold in folds)
    assert "context_lengths" in page.main.get_text()


def test_tables_have_headers_and_scroll_by_keyboard(page):
    table = page.find("table")
    assert [cell["scope"] for cell in table.select("thead th")] == ["col", "col"]
    assert table.parent["tabindex"] == "0"


def test_a_large_drawing_enters_as_png():
    svg, png = "<svg>" + "x" * render.SVG_LIMIT_BYTES + "</svg>", "iVBOR\n"
    assert render.image_uri({"image/svg+xml": svg, "image/png": png}) == "data:image/png;base64,iVBOR"
    drawing = """<svg id="a">\n  <title>50 % 'of' #1 &amp; 上下文</title>\n</svg>"""
    kind, _, content = render.image_uri({"image/svg+xml": drawing, "image/png": png}).partition(",")
    assert kind == "data:image/svg+xml;charset=utf-8" and not set(content) & set("<>#&'\n")
    assert unquote(content) == " ".join(drawing.split())


def test_closing_cells_of_any_notebook_end_the_page():
    """A reader finds the limits and the way to a rerun after the results, though the first notebook holds them."""
    first, second = (
        new_notebook(cells=[new_markdown_cell(f"## {name}", metadata={"tags": ["en", *more]}) for name, *more in names])
        for names in ([("Answers",), ("Limits", "closing")], [("Results",)])
    )
    document = render.page([first, second], "en")
    assert document.index("Answers") < document.index("Results") < document.index("Limits", document.index("<main"))
