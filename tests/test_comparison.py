"""Two runs side by side: a ratio between what cannot be compared would be believed."""

import shutil
from types import SimpleNamespace

import pytest
from PIL import Image

from kvlab import __main__, paths, sweep
from kvlab.analyse.summary import Estimate
from kvlab.article import comparison, race

RUN = {"profile": "a", "model": "m", "model_revision": None, "dtype": "float32", "batch_size": 1}


@pytest.mark.parametrize("name, other", [("model", "n"), ("dtype", "bfloat16"), ("batch_size", 2)])
def test_runs_that_differ_in_more_than_the_machine_are_refused_by_name(name, other):
    with pytest.raises(comparison.NotComparable, match=name):
        comparison.check(SimpleNamespace(**RUN), SimpleNamespace(**RUN | {"profile": "b", name: other}))


def test_a_ratio_reaches_from_the_worst_to_the_best_combination():
    slow, fast = Estimate(6, 4.0, 3.0, 5.0, "ok"), Estimate(8, 2.0, 1.5, 2.5, "ok")
    found = comparison.ratio(slow, fast)
    assert (found.n, found.median, found.low, found.high) == (6, 0.5, 0.3, pytest.approx(2.5 / 3))


@pytest.fixture
def twice(tmp_path, monkeypatch):
    """The committed run under the names of two profiles."""
    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path))
    for name in ("cpu", "smoke"):
        folder = tmp_path / "results" / name
        folder.mkdir(parents=True)
        for path in (paths.ROOT / "results" / "cpu").glob("*.json*"):
            shutil.copy(path, folder)
        sweep.remember_parameters(sweep.parameters(name) | {"profile": name})
    return tmp_path


def test_a_run_beside_itself_has_ratio_one_in_both_languages(twice, capsys):
    assert __main__.main(["compare", "cpu", "smoke"]) == 0
    for language, one in (("en", "1.00x"), ("zh", "1.00\u00a0倍")):
        page = (twice / "results" / f"compare_cpu_smoke.{language}.html").read_text()
        assert page.count(one) >= 10 and f"compare_cpu_smoke.{'zh' if language == 'en' else 'en'}.html" in page


def test_another_precision_and_a_run_that_does_not_exist_end_with_2_and_write_nothing(twice, capsys):
    sweep.remember_parameters(sweep.parameters("smoke") | {"profile": "smoke", "dtype": "bfloat16"})
    assert __main__.main(["compare", "cpu", "smoke"]) == 2
    assert __main__.main(["compare", "cpu", "a10"]) == 2
    said = capsys.readouterr().err
    assert "dtype ('float32' and 'bfloat16')" in said and "results/a10 holds no run yet" in said
    assert not list(twice.rglob("compare_*"))


def test_the_race_is_made_of_what_was_recorded(twice, monkeypatch):
    monkeypatch.setattr(race, "GIF_FRAMES", 3)
    assert __main__.main(["race", "--profile", "cpu"]) == 0
    for language in ("zh", "en"):
        picture = Image.open(twice / "figures" / "cpu" / f"race.{language}.gif")
        assert picture.n_frames == 3
    assert __main__.main(["race", "--profile", "a10"]) == 2
