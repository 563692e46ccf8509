"""A mistyped parameter must stop the run at once and name the right one."""

import json

import pytest

from kvlab import params, paths


def refused(*assignments, profile="smoke"):
    with pytest.raises(params.ParameterError) as error:
        params.load(profile, list(assignments))
    return str(error.value)


@pytest.mark.parametrize("profile", sorted(path.stem for path in paths.PARAMS.glob("*.yaml")))
def test_every_shipped_profile_is_valid(profile):
    assert params.load(profile)["profile"] == profile


def test_a_mistyped_key_names_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("context_lenghts: [128]\n")
    monkeypatch.setattr(paths, "PARAMS", tmp_path)
    message = refused(profile="mine")
    assert "context_lenghts" in message and "did you mean 'context_lengths'" in message


def test_a_mistyped_profile_names_the_nearest():
    assert "did you mean 'smoke'" in refused(profile="smok")
    assert refused(profile="../cpu").endswith("'../cpu' in params/; there are: a10, cpu, smoke; did you mean 'cpu'?")
    assert "mean" not in refused(profile="nonsense")


@pytest.mark.parametrize("text, mend", [("foo", "write it as in"), ("=2", "write"), ("model='a", "close every")])
def test_an_override_that_is_no_assignment_is_not_told_as_an_open_quote(text, mend):
    with pytest.raises(params.ParameterError, match=f"is not of the form name=value; {mend}"):
        params.read_assignments(text)


@pytest.mark.parametrize(
    "assignment, key",
    [
        ("context_lengths=128", "context_lengths"),
        ("context_lengths=[128, 128]", "context_lengths"),
        ("context_lengths=[]", "context_lengths"),
        ("context_lengths=[0]", "context_lengths"),
        ("context_lengths=[12.5]", "context_lengths"),
        ("repetitions=true", "repetitions"),
        ("repetitions='3'", "repetitions"),
        ("concurrencies=[0]", "concurrencies"),
        ("dtype=float23", "dtype"),
        ("dtype=8", "dtype"),
        ("language=de", "language"),
        ("attention_kernels=[flash]", "attention_kernels"),
        ("output_jitter=1.5", "output_jitter"),
        ("output_tokens=1", "output_tokens"),
        ("seed=-1", "seed"),
        ("kv_cache_space_gib=.nan", "kv_cache_space_gib"),
        ("model=null", "model"),
    ],
)
def test_an_impossible_value_names_its_key(assignment, key):
    assert key in refused(assignment)


@pytest.mark.parametrize(
    "text", ["context_lengths", "[1]", "=3", "repetitions=[", "repetitions=1\nrepetitions=2"]
)
def test_a_broken_assignment_is_one_sentence(text):
    message = refused(text)
    assert "\n" not in message and "SET" in message


def test_a_key_given_twice_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("seed: 1\nseed: 2\n")
    monkeypatch.setattr(paths, "PARAMS", tmp_path)
    assert "seed is given twice" in refused(profile="mine")


def test_several_assignments_with_blanks_in_their_values():
    values = params.load("smoke", ["context_lengths=[16, 32] repetitions=3  seed=7", "dtype=bfloat16"])
    assert (values["context_lengths"], values["repetitions"], values["seed"]) == ([16, 32], 3, 7)
    assert values["dtype"] == "bfloat16"


def test_br32_the_last_position_may_be_used_and_one_more_may_not():
    values = params.load("smoke", ["context_lengths=[60] serving_context_length=8 serving_output_tokens=2"])
    values |= {"output_tokens": 4, "step_curve_context_length": 8, "step_curve_output_tokens": 4}
    values |= {"output_lengths_context": 8}
    params.check_positions(values, 64)
    with pytest.raises(
        params.ParameterError, match=r"60 tokens of context and 10 of output need 70 .*64.*at most 54"
    ):
        params.check_positions(values | {"output_tokens": 10}, 64)


@pytest.mark.parametrize(
    "text, words",
    [
        ("base_url=localhost:8000", "must begin with http"),
        ("base_url=ftp://x", "must begin with http"),
        ("shared_prefix_lengths=[512]", "below reuse_context_length"),
        ("open_loop_rates=[0.0]", "open_loop_rates must lie between"),
    ],
)
def test_what_the_second_server_and_the_client_cannot_do_is_refused(text, words):
    assert words in refused(text)


def test_br32_the_prompts_with_shared_prefixes_count_where_they_are_measured():
    long = "reuse_context_length=9000 full_cache_space_gib="
    params.check_positions(params.load("cpu", [long + "0.0"]), 8192)
    with pytest.raises(params.ParameterError, match="reuse_context_length: 9000 tokens"):
        params.check_positions(params.load("cpu", [long + "0.5"]), 8192)


def notebooks():
    return sorted(paths.NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("notebook", notebooks(), ids=lambda path: path.stem)
def test_br43_every_notebook_declares_its_parameters_in_one_tagged_cell(notebook):
    assert params.declared(notebook)["profile"][0] == "str"


def test_br43_a_notebook_without_the_tag_is_refused(tmp_path):
    content = json.loads(notebooks()[0].read_text())
    for cell in content["cells"]:
        cell["metadata"].pop("tags", None)
    copy = tmp_path / "untagged.ipynb"
    copy.write_text(json.dumps(content))
    with pytest.raises(params.ParameterError, match="exactly one"):
        params.declared(copy)


def test_notebooks_agree_on_type_and_default_of_a_shared_parameter():
    assert params.all_declared()
