"""What comes from a model, a server or a parameter is data: it runs no code, writes nowhere, and no secret is kept."""

import http.client
import json
import os
import re
from types import SimpleNamespace

import nbformat
import pytest
from bs4 import BeautifulSoup
from test_client import QUICK, replaying
from test_notebook_run import run  # noqa: F401  a fixture
from test_server import fake, folder  # noqa: F401  a fixture

from kvlab import models, params, paths, report, sweep, weights
from kvlab.article import prose, render, sections
from kvlab.measure import serving

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)><a href='javascript:alert(3)'>[x](javascript:alert(4))"
SECRET = "s3cret-never-to-be-kept"


# ---- the server and JupyterLab


def test_the_server_listens_on_loopback_and_serves_only_who_has_its_token(folder):  # noqa: F811
    with fake(folder) as server:
        assert server.command[server.command.index("--host") + 1] == "127.0.0.1"
        token = os.environ[server.token_variable]
        assert token not in " ".join(server.command) + json.dumps(server.facts())
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            connection.request("GET", "/v1/models", headers=headers)
            assert connection.getresponse().status == 401
        log = server.log_path.read_text()
    assert server.token_variable not in os.environ and token not in log


def test_jupyterlab_is_opened_on_loopback_with_its_token():
    lab = re.search(r"^lab:\n((?:\t.*\n)+)", (paths.ROOT / "Makefile").read_text(), re.M)[1]
    assert "--ip=127.0.0.1" in lab and not re.search(r"token|password", lab)


@pytest.mark.parametrize(
    "arguments",
    ["--trust-remote-code", "--trust_remote_code", "--trust-rem", "--host=0.0.0.0", "--api-key s", "--load-format=pt",
     "--config x.yaml", "--middleware a.b", "--tensor-parallel-size 2 --uds /x"],
)  # fmt: skip
def test_no_argument_of_the_server_undoes_that(arguments):
    with pytest.raises(params.ParameterError, match="server_arguments must not contain"):
        params.load("smoke", [f"server_arguments='{arguments}'"])


# ---- secrets


def test_a_secret_given_as_a_parameter_is_refused_and_not_repeated(monkeypatch):
    for text in (f"token_variable={SECRET}", f"base_url='http://me:{SECRET}@host'", f"base_url='http://h/?key={SECRET}'"):
        with pytest.raises(params.ParameterError, match="environment variable") as refused:
            params.load("smoke", [text])
        assert SECRET not in str(refused.value)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    assert params.load("smoke", ["token_variable=MY_TOKEN"])["token_variable"] == "MY_TOKEN"


def test_a_servers_token_reaches_the_server_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path / "out"))
    monkeypatch.setenv("MY_TOKEN", SECRET)
    (tmp_path / "server").mkdir()
    with replaying(tmp_path / "server", QUICK) as server:
        values = params.load("smoke", [f"model=random:llama token_variable=MY_TOKEN base_url={server.base_url}"])
        p = SimpleNamespace(**values, unused=None)
        monkeypatch.setattr(serving.prompts, "token_ids", lambda length, *_: [1] * length)
        kept = sweep.begin(p, {"environment": "e", "boot": "b"}).store("s1")
        point, repetition = sweep.serving_points(p)[0][0], 1
        with serving.open_server(p, 256) as target:
            serving.measure_point(p, target, point, repetition, kept.append)
        assert {entry["headers"]["authorization"] for entry in server.log()} == {f"Bearer {SECRET}"}
        address = server.base_url
    assert len(kept.load()) > 2
    written = [path.read_text() for path in (tmp_path / "out").rglob("*.jsonl")]
    assert not any(SECRET in text for text in written) and not any(address in text for text in written)
    assert SECRET not in (paths.results("smoke") / "parameters.json").read_text()


# ---- hostile text on its way to the page


def active(document):
    """Elements and attributes of a page's body that would do something."""
    found = BeautifulSoup(document, "html.parser")
    main = found.find("main")
    handlers = [tag for tag in main.find_all(True) if any(name.startswith("on") for name in tag.attrs)]
    links = [tag for tag in main.find_all(href=True) if tag["href"].strip().lower().startswith("javascript:")]
    foreign = [tag for tag in found.find_all("script") if "alert(" in tag.get_text()]
    return handlers + links + foreign + main.find_all("script")


def test_hostile_output_errors_and_parameters_are_shown_as_text(run):  # noqa: F811
    _, _, page = run(f"print({HOSTILE!r})", f"{HOSTILE!r}", f"raise ValueError({HOSTILE!r})")
    assert active(page) == [] and "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize("language", prose.LANGUAGES)
def test_hostile_names_of_models_and_machines_are_shown_as_text(language, monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path))
    outputs = []
    new = nbformat.v4.new_output
    monkeypatch.setattr(
        prose, "display", lambda data, raw, metadata: outputs.append(new("display_data", data, metadata=metadata))
    )
    environment = {"card_model": HOSTILE, "cpu_model": HOSTILE, "cpu_quota": 2, "cpu_flags": [HOSTILE],
                   "system": HOSTILE, "memory_limit_bytes": 1, "packages": {HOSTILE: HOSTILE},
                   "environment": HOSTILE, "boot": "b",
                   "kvlab": {"version": HOSTILE, "commit": HOSTILE, "dirty": True}, "recorded_at": HOSTILE}  # fmt: skip
    p = {"profile": "smoke", "model": HOSTILE, "model_revision": HOSTILE, "dtype": HOSTILE, "threads": HOSTILE}
    sweep.begin(SimpleNamespace(**p), environment)
    sections.machine(environment, p, language, source=HOSTILE)
    sections.limits(environment | {"card_model": None}, p, language)
    cell = nbformat.v4.new_code_cell("", outputs=outputs)
    warnings = [prose.plain("status.failed_notebook", language, notebook=HOSTILE, reason=HOSTILE)]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    foot = sections.provenance("smoke", language)
    page = render.page([notebook], language, HOSTILE, provenance=foot, warnings=warnings)
    assert active(page) == [] and page.count("&lt;script&gt;alert(1)") >= 5
    assert "<script>alert" not in page


# ---- models


@pytest.fixture
def model(tmp_path):
    """A folder with a model's configuration and no weights."""
    folder = tmp_path / "model"  # noqa: F811
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **models.TINY}))
    return folder


def test_pickled_weights_are_refused_with_a_sentence(model):
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="no pickled weights"):
        models.resolve(str(model))


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/x.safetensors", "model.bin", 3])
def test_an_index_of_weights_names_files_of_its_own_folder_only(model, name):
    (model / "model.safetensors").touch()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="weight_map must name files of this folder"):
        models.resolve(str(model))


@pytest.mark.parametrize("architecture", ["llama", "no_such_architecture"])
def test_code_that_comes_with_a_model_is_never_run(model, architecture, tmp_path):
    canary = tmp_path / "ran"
    (model / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    content = json.loads((model / "config.json").read_text()) | {"model_type": architecture}
    auto = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    (model / "config.json").write_text(json.dumps(content | {"auto_map": auto}))
    source = models.resolve(f"random:{model}")
    if architecture == "llama":
        assert weights.load(source, "float32").config.model_type == "llama"
    else:
        with pytest.raises(ValueError, match="auto_map.*never run"):
            weights.load(source, "float32")
    assert not canary.exists()


@pytest.mark.parametrize("name", ["modelscope:../..", "hf:../x", "hf:x/..", "modelscope:a/b/../../../c", "hf:/a"])
def test_a_hubs_model_may_not_be_named_like_a_way_out_of_its_cache(name):
    with pytest.raises(ValueError, match="unknown model"):
        models.resolve(name)


def test_a_model_writes_into_the_cache_and_nowhere_else(tmp_path, monkeypatch):
    """Its folder's name and what its configuration calls paths choose no place to write to."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "..." / "model"  # noqa: F811
    folder.mkdir(parents=True)
    hostile = {"_name_or_path": "../../outside", "name_or_path": str(tmp_path / "outside")}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **models.TINY, **hostile}))
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    written = weights.served_folder(models.resolve(f"random:{folder}/../model"), "float32")
    assert written.parent == tmp_path / "cache"
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before


def test_a_profile_may_not_name_a_place_to_write_to():
    for name in ("../x", "/tmp/x", "a/b", "..", ""):
        with pytest.raises(params.ParameterError):
            report.checked(name, [])
