"""The doctor: a rented hour is not lost to what could have been said in seconds, before anything is installed."""

import ast
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvlab import doctor, paths

GIB = 1024**3


@pytest.fixture
def machine(monkeypatch):
    """A machine on which everything fits profile a10; tests take one thing away."""

    def machine(**card):
        found = {"name": "NVIDIA A10", "driver": "550.163.01", "total": 24 * GIB, "free": 23 * GIB, "pids": []} | card
        monkeypatch.setattr(doctor, "query_card", lambda: SimpleNamespace(**found) if found["name"] else None)
        pins = dict(line.split("==") for line in (paths.ROOT / "requirements/a10.txt").read_text().splitlines())
        monkeypatch.setattr(doctor, "installed_version", pins.get)
        monkeypatch.setattr(doctor, "reachable", lambda address: True)
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
        usage = SimpleNamespace(total=1000 * GIB, free=1000 * GIB)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
        return usage

    return machine


def failing(name="a10"):
    return {check: sentence for check, holds, sentence in doctor.examine(name) if not holds}


def test_a_machine_that_has_everything_gets_exit_code_0(machine, capsys):
    machine()
    assert doctor.doctor("a10") == 0, capsys.readouterr().out
    assert "this machine can run PROFILE=a10" in capsys.readouterr().out


def test_br51_no_card_is_said_with_what_the_profile_wants(machine, monkeypatch, capsys):
    machine(name=None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert doctor.doctor("a10") == 1
    assert "is for NVIDIA A10, this machine shows no CUDA device: use a machine that has it" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert failing()["card"].endswith("unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    "card, check, words",
    [
        ({"name": "Tesla T4"}, "card", "this machine has Tesla T4"),
        ({"driver": "535.161.08"}, "driver", "driver 535.161.08 is too old for CUDA 12.4: use a machine with 550.54"),
        ({"driver": "550.40.07"}, "driver", "550.40.07 is too old"),
        ({"free": 10 * GIB}, "memory", "10.0 GiB of memory are free on the card, 21.6 GiB are needed"),
        ({"pids": ["4711"]}, "alone", "other processes are on the card"),
    ],
)
def test_br51_each_thing_that_does_not_fit_is_one_sentence_with_found_and_needed(machine, card, check, words):
    machine(**card)
    found = failing()
    assert set(found) == {check} and words in found[check]
    assert "\n" not in found[check] and ":" in found[check]


@pytest.mark.parametrize("driver", ["550.54.14", "550.163.01", "560.35"])
def test_a_driver_that_carries_cuda_12_4_is_no_finding(machine, driver):
    machine(driver=driver)
    assert not failing()


def test_an_unreachable_hub_offers_a_local_folder_and_a_local_folder_needs_no_network(machine, monkeypatch, tmp_path):
    machine()
    monkeypatch.setattr(doctor, "reachable", lambda address: False)
    assert 'SET="model=/its/folder"' in failing()["model"]
    (tmp_path / "model.safetensors").write_text("")
    assert doctor.model(SimpleNamespace(model=str(tmp_path), stack="a10")) == "its folder is there"
    with pytest.raises(doctor.Finding, match="neither safetensors nor GGUF"):
        doctor.model(SimpleNamespace(model=str(tmp_path / "none"), stack="a10"))


def test_versions_that_are_not_the_locks_are_named(machine, monkeypatch):
    machine()
    pinned = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: "2.6.0" if name == "torch" else pinned(name))
    assert failing() == {
        "versions": "torch 2.6.0 (pinned: 2.5.1): run make setup ENV=a10 or install requirements/a10.txt"
    }


def test_before_set_up_the_environment_is_one_finding_and_not_one_per_package(machine, monkeypatch):
    machine()
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    assert failing() == {"versions": "its environment is not set up: run make setup ENV=a10"}


def test_a_full_disk_names_how_much_is_missing_and_where_else_things_may_go(machine):
    machine().free = 3 * GIB
    found = failing()
    assert set(found) == {"disk"} and "3.0 GiB of disk are free" in found["disk"] and "KVLAB_OUTPUT" in found["disk"]


def test_a_folder_that_cannot_be_written_is_named_with_its_reason_and_not_called_full(machine, monkeypatch):
    machine()
    monkeypatch.setenv("KVLAB_OUTPUT", "/proc/kvlab")
    found = failing("smoke")
    assert set(found) - {"versions"} == {"disk"}
    assert re.fullmatch(r"/proc cannot be written \([\w ]+\): .* another folder with KVLAB_OUTPUT", found["disk"])


def test_before_set_up_the_disk_that_the_readme_names_is_what_the_doctor_counts(machine, monkeypatch, tmp_path):
    usage = machine()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))  # nothing has been fetched
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    monkeypatch.setattr(doctor, "has_environment", lambda: False)
    readme = (paths.ROOT / "README.md").read_text()
    total, *parts = map(int, re.search(r"- (\d+) GiB of disk: (\d+) for .*, (\d+) for .*, (\d+) for", readme).groups())
    weights = doctor.download_bytes(doctor.profile_values("a10"))
    counted = (doctor.ENVIRONMENT_BYTES["a10"], weights, doctor.WORKING_BYTES)
    assert parts == [math.ceil(part / GIB) for part in counted] and total == sum(parts)
    without_card = int(re.search(r"(\d+) GiB of disk \(", readme).group(1))
    assert without_card * GIB == doctor.ENVIRONMENT_BYTES["cpu"] + doctor.WORKING_BYTES
    usage.free = total * GIB
    assert "disk" not in failing()
    usage.free = (total - 1) * GIB
    assert set(failing()) == {"versions", "disk"}


def test_a_models_name_tells_no_fewer_bytes_than_its_weights_have():
    from kvlab.analyse import cost

    for name, shape in cost.known_models().items():
        counted = doctor.download_bytes(SimpleNamespace(model=f"hf:ORG/{name}"))
        assert not counted or 1 <= counted / cost.weight_bytes(shape, "bfloat16") < 1.25, name
    assert doctor.download_bytes(SimpleNamespace(model="hf:ORG/Mixtral-8x7B-v0.1")) > 2 * 46.7e9


def test_a_small_shared_memory_is_noticed(machine):
    machine().total = 64 * 2**20
    assert "--shm-size" in failing()["shared_memory"]


@pytest.mark.parametrize("name", ["a01", "smok", "nonsense", "../cpu", "cpu\n", ""])
def test_a_profile_that_is_none_is_bad_input_and_told_as_report_tells_it(name, capsys):
    from kvlab import params

    assert doctor.doctor(name) == 2  # and not 1, which is for a machine that lacks something
    with pytest.raises(params.ParameterError) as error:
        params.profile_path(name)
    assert capsys.readouterr().err == f"kvlab: {error.value}\n"


def test_a_profile_that_is_no_text_is_bad_input(tmp_path, monkeypatch, capsys):
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "mine.yaml").write_bytes(b"model: \xff")
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert [doctor.doctor(name) for name in ("mine", "auto")] == [2, 2]
    assert capsys.readouterr().err.count("params/mine.yaml is no readable text file; write it anew in UTF-8") == 2


def test_the_doctors_file_run_by_itself_ends_with_2_for_bad_input():
    command = [sys.executable, str(paths.ROOT / "kvlab/doctor.py"), "--profile"]
    done = subprocess.run([*command, "smok"], capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean 'smoke'?" in done.stderr and not done.stdout


@pytest.mark.parametrize("card, profile", [("NVIDIA A10", "a10"), ("Tesla T4", "cpu"), (None, "cpu")])
def test_profile_auto_picks_by_the_card_and_says_what_it_picked(machine, capsys, card, profile):
    machine(name=card)
    assert doctor.chosen("auto") == profile
    said = capsys.readouterr().err
    assert (card or "no CUDA device") in said and said.rstrip().endswith(f"the profile is {profile}")
    assert doctor.chosen("smoke") == "smoke"


def test_the_profile_is_read_the_same_without_yaml():
    from kvlab import params

    for name in ("a10", "cpu", "smoke"):
        values, plain = params.load(name), doctor.profile_values(name)
        for key in ("model", "dtype", "device", "expected_device", "server_arguments"):
            assert getattr(plain, key) == values[key], (name, key)


def test_br51_it_parses_on_python_3_8_and_starts_on_the_standard_library_alone():
    source = (paths.ROOT / "kvlab/doctor.py").read_text()
    ast.parse(source, feature_version=(3, 8))
    assert "torch" not in {node.names[0].name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import)}
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(paths.ROOT / "kvlab/doctor.py"), "--profile", "a10"],
        capture_output=True, text=True, env={"PATH": ""}, cwd=paths.ROOT)  # fmt: skip
    assert done.returncode == 1 and not done.stderr
    assert "make setup ENV=a10" in done.stdout and "shows no CUDA device" in done.stdout


def test_a_card_is_read_from_what_nvidia_smi_prints(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase "$*" in *compute-apps*) echo 4711;; *) echo "NVIDIA A10, 550.163.01, 23028, 22500";; esac\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = doctor.query_card()
    assert (found.name, found.driver, found.free, found.pids) == ("NVIDIA A10", "550.163.01", 22500 * 2**20, ["4711"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.query_card() is None


def test_a_network_that_swallows_everything_is_given_up_on(monkeypatch):
    monkeypatch.setattr(doctor, "NETWORK_TIMEOUT_S", 0.2)
    assert not doctor.reachable("https://192.0.2.1/")  # an address that is nobody's


def test_the_command_reaches_the_doctor(capsys):
    from kvlab import __main__

    assert __main__.main(["doctor", "--profile", "a10"]) in (0, 1)
    assert "A10" in capsys.readouterr().out
