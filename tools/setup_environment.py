"""Builds kvlab's environment where it is missing or out of date, and prints the path of its interpreter.

make calls this before every target. It runs before anything is installed, so it needs the standard library
alone, and keeps to syntax that Python 3.8 reads, so that an old interpreter can say what is wrong. The path
goes to stdout, all that a person reads to stderr. Exit status: 0, or 2 after a sentence that says what to do.
"""

import argparse
import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_NEEDED = (3, 11)  # the locks are resolved for this one
GIB = 1024**3
FREE_BYTES = {"cpu": 5 * GIB, "cuda": 12 * GIB, "a10": 15 * GIB}  # installed, its downloads, and pip's cache of these
FOLDERS = {"cpu": ".venv", "a10": ".venv-a10"}


class SetupError(Exception):
    """The environment cannot be built; the message is one sentence that says what to do."""


def say(sentence):
    """Writes a sentence to stderr, past whoever reads the interpreter's path."""
    print(f"kvlab: {sentence}", file=sys.stderr, flush=True)


# ---- may this interpreter be used?


def python_problem(version, executable, found_elsewhere):
    """Returns what is wrong with an interpreter of this version, or None."""
    if tuple(version[:2]) == PYTHON_NEEDED:
        return None
    needed, found = (".".join(map(str, each[:2])) for each in (PYTHON_NEEDED, version))
    mend = f"install Python {needed} and run make again with PYTHON=/path/to/python{needed}"
    if found_elsewhere:
        mend = f"run make again with PYTHON={found_elsewhere}"
    return f"needs Python {needed}, found {found} ({executable}): {mend}"


def check_interpreter():
    """Raises SetupError on another Python than the locks are made for, or another kind of machine."""
    elsewhere = shutil.which("python{}.{}".format(*PYTHON_NEEDED))
    problem = python_problem(sys.version_info, sys.executable, elsewhere)
    if problem:
        raise SetupError(problem)
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise SetupError(f"needs Linux on x86-64, found {system} on {machine}: run it on such a machine")


def active_environment(environ, prefix, site_packages, own_folder):
    """Tells whether this interpreter is that of an activated environment, not built here, that has kvlab."""
    active = {os.path.realpath(environ[key]) for key in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(key)}
    prefix = os.path.realpath(prefix)
    if prefix not in active or prefix == os.path.realpath(own_folder):
        return False
    return any(importlib.metadata.distributions(name="kvlab", path=[site_packages]))


# ---- what is out of date?


def digest(*parts):
    """Returns the SHA-256 of some bytes."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def wanted_stamp(root, lock):
    """Returns what a finished environment was built from: the lock, and kvlab's own description and place."""
    project = digest((root / "pyproject.toml").read_bytes(), str(root).encode())
    return {"lock": digest(lock.read_bytes()), "kvlab": project}


def read_stamp(folder):
    """Returns the stamp of a whole environment; {} where none was finished or pip was cut off while it wrote."""
    if not (folder / "bin" / "python").exists() or half_installed(folder):
        return {}
    try:
        return json.loads((folder / "kvlab-stamp.json").read_text())
    except (OSError, ValueError):
        return {}


def half_installed(folder):
    """Tells whether pip had begun to write packages and did not come to its end."""
    try:
        words = (folder / "setup.log").read_text(errors="replace")
    except OSError:
        return False
    return "Installing collected packages" in words and "Successfully installed" not in words


def work_left(stamp, wanted):
    """Returns "everything", "kvlab" or "nothing"."""
    if stamp.get("lock") != wanted["lock"]:
        return "everything"
    return "nothing" if stamp == wanted else "kvlab"


# ---- which build of torch does pip find?


def own_dependencies(report):
    """Returns the GPU packages that the torch in a pip report declares; [] for a CPU build.

    report: the object that `pip install --dry-run --report` writes.
    """
    (torch,) = [each["metadata"] for each in report["install"] if each["metadata"]["name"].lower() == "torch"]
    if torch["version"].endswith("+cpu"):
        return []
    declared = [line for line in torch.get("requires_dist", []) if "extra ==" not in line]
    names = [re.match(r"[\w.-]+", line).group() for line in declared]
    return [name for name in names if re.match(r"(nvidia|cuda|triton|rocm|pytorch-triton)\b", name)]


def find_torch(python, requirement):
    """Asks pip which build it would install, without installing it, and returns its own_dependencies."""
    command = [str(python), "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    answer = subprocess.run([*command, "--report", "-", requirement], capture_output=True, text=True)
    if answer.returncode:
        raise SetupError(explain(answer.stderr))
    return own_dependencies(json.loads(answer.stdout))


# ---- installing

NO_NETWORK = (
    "connection broken|NewConnectionError|ConnectTimeout|ReadTimeout|ConnectionResetError|Connection refused"
    "|name resolution|Network is unreachable|ProxyError|SSLError"
)


def explain(pip_output):
    """Returns one sentence for what stopped pip."""
    if re.search("No space left on device|Errno 28|Disk quota exceeded", pip_output):
        temporary = os.environ.get("TMPDIR", "/tmp")
        return f"the disk is full: make room in {ROOT} and {temporary}, then run the same command"
    if re.search(NO_NETWORK, pip_output):
        return "pip cannot reach its package index: connect to the network, then run the same command"
    missing = re.search(r"No matching distribution found for (\S+)", pip_output)
    if missing:
        return f"pip's package index has no {missing.group(1)} for this machine: use an index that has it"
    errors = re.findall(r"^ERROR: (.*)$", pip_output, re.MULTILINE)
    return f"pip failed ({errors[-1] if errors else 'it gave no reason'})"


def progress(log_text, packages_installed, packages):
    """Returns how far pip is, in words."""
    if "Installing collected packages" in log_text:
        return f"installed {min(packages_installed, packages)} of {packages} packages"
    names = re.findall(r"^Collecting (\S+)", log_text, re.MULTILINE) or ["(none yet)"]
    return f"fetching package {len(names)} of {packages}: {names[-1]}"


def show_progress(process, log, site_packages, packages):
    """Shows how far pip is until it ends: one line rewritten on a terminal, else a line every 15 s."""
    terminal, started, shown = sys.stderr.isatty(), time.monotonic(), time.monotonic()
    start, end = ("\r\033[K", "") if terminal else ("", "\n")
    while process.poll() is None:
        time.sleep(0.5)
        if terminal or time.monotonic() - shown > 15:
            shown = time.monotonic()
            installed = sum(1 for _ in site_packages.glob("*.dist-info"))
            words = progress(log.read_text(errors="replace"), installed, packages)
            print(f"{start}kvlab: {shown - started:3.0f} s, {words}", end=end, file=sys.stderr, flush=True)
    if terminal:
        print(start, end="", file=sys.stderr, flush=True)


def pip_install(folder, arguments, packages, log_name="setup.log"):
    """Runs `pip install` in the environment; raises SetupError with one sentence when it fails."""
    log, (site_packages,) = folder / log_name, folder.glob("lib/python3.*/site-packages")
    command = [str(folder / "bin/python"), "-m", "pip", "install", "--no-compile", "--no-input", *arguments]
    environment = dict(os.environ, PIP_USER="0", PYTHONUNBUFFERED="1")
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
        try:
            show_progress(process, log, site_packages, packages)
        finally:
            process.wait()
    if process.returncode:
        raise SetupError(f"{explain(log.read_text(errors='replace'))}; pip's own words: {log}")


def check_disk(needed_bytes):
    """Raises SetupError when the disk cannot hold the environment."""
    free = shutil.disk_usage(ROOT).free / GIB
    if free < needed_bytes / GIB:
        raise SetupError(
            f"needs {needed_bytes / GIB:.0f} GiB of disk for its environment, {ROOT} has {free:.1f} GiB free:"
            " make room, then run the same command"
        )


def create(folder):
    """Makes an empty virtual environment, in place of whatever stood there."""
    base = getattr(sys, "_base_executable", sys.executable)  # not the one that is about to be replaced
    made = subprocess.run([base, "-m", "venv", "--clear", str(folder)], capture_output=True, text=True)
    if made.returncode:
        reason = (made.stderr.strip() or made.stdout.strip()).replace("\n", " ")
        raise SetupError(
            f"`{base} -m venv {folder.name}` failed: install python3.11-venv (Debian) or name a complete"
            f" Python with PYTHON= (its words: {reason})"
        )


def pins(lock):
    """Returns {name: version} of a lock."""
    return dict(line.split("==") for line in lock.read_text().splitlines() if "==" in line)


def install_lock(folder, lock, stack):
    """Installs exactly what the lock lists; a torch that is no CPU build also gets what it declares.

    Where packages stand already, pip fetches all that differ before it replaces the first.
    """
    versions = pins(lock)
    torch = f"torch=={versions['torch']}"
    gpu_packages = find_torch(folder / "bin/python", torch) if stack == "cpu" else []
    if gpu_packages:
        say(
            f"pip finds no CPU build of {torch}, so the GPU build is installed with the {len(gpu_packages)}"
            " GPU packages it needs: about 6.6 GB on disk; it runs on the CPU all the same"
        )
        check_disk(FREE_BYTES["cuda"])
    pip_install(folder, ["--no-deps", "-r", str(lock)], len(versions))
    if gpu_packages:
        pip_install(folder, ["-c", str(lock), torch], len(versions) + len(gpu_packages))
    else:
        remove(folder, left_over(folder, versions))


def left_over(folder, versions):
    """Returns the installed packages that the lock does not name (any more)."""
    (site_packages,) = folder.glob("lib/python3.*/site-packages")
    found = {each.metadata["Name"] for each in importlib.metadata.distributions(path=[str(site_packages)])}
    kept = {*versions, "pip", "setuptools", "kvlab"}
    return sorted(name for name in found if name and re.sub(r"[-_.]+", "-", name).lower() not in kept)


def remove(folder, names):
    """Uninstalls packages; one that resists stays, since it is only too much."""
    if names:
        command = [str(folder / "bin/python"), "-m", "pip", "uninstall", "--yes", "--quiet", *names]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compile_modules(folder):
    """Compiles every module once, on all cores: where Python may not write its caches, each start would do it again."""
    say("compiling what was installed (a minute)")
    (site_packages,) = folder.glob("lib/python3.*/site-packages")
    command = [str(folder / "bin/python"), "-m", "compileall", "-q", "-j", "0", str(site_packages)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # templates that are no Python stay


def build(folder, lock, stack):
    """Brings the environment up to date; interrupted at any moment, the next call does the rest.

    An environment of an older lock gets what differs and can be used until then: what stops pip while it fetches
    leaves it as it was. Only where none was finished, or pip was cut off while it wrote, is it built from nothing.
    """
    wanted, stamp, started = wanted_stamp(ROOT, lock), folder / "kvlab-stamp.json", time.monotonic()
    standing = read_stamp(folder)
    left = work_left(standing, wanted)
    if left == "nothing":
        return
    if left == "everything":
        if standing:
            say(f"bringing {folder.name} up to date with {lock.relative_to(ROOT)}")
        else:
            check_disk(FREE_BYTES[stack])
            say(f"setting up {folder.name} from {lock.relative_to(ROOT)} (a few minutes, once)")
            with contextlib.suppress(OSError):
                stamp.unlink()
            create(folder)
        install_lock(folder, lock, stack)
        stamp.write_text(json.dumps({"lock": wanted["lock"]}))
        compile_modules(folder)
    pip_install(folder, ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)], 1, "kvlab.log")
    stamp.write_text(json.dumps(wanted))
    say(f"{folder.name} is ready after {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def one_at_a_time(lock):
    """Lets a second make wait for the first; a file system without locks lets it pass."""
    import fcntl  # only where check_interpreter has let us through

    with lock.open() as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- what the machine lacks, and what happens then


def has_library(name):
    """Tells whether the dynamic linker finds a shared library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def notices(library_found, compiler_found):
    """Returns a sentence for each thing outside Python that vLLM for CPUs misses, and what happens then."""
    sentences = []
    if not library_found:
        sentences.append(
            "libnuma.so.1 is missing, so vLLM cannot start and the report does without its serving section"
            " (S1): install libnuma1 (Debian) or numactl-libs to have it"
        )
    if not compiler_found:
        sentences.append(
            "there is no C++ compiler, so vLLM cannot compile the model: install g++, or add"
            ' SET="enforce_eager=true"'
        )
    return sentences


def stack_of(profile):
    """Returns the stack that a profile runs on; raises SetupError, before minutes are spent, for one that is none."""
    from kvlab import doctor  # the standard library alone

    try:
        return doctor.profile_values(doctor.chosen(profile)).stack
    except doctor.Finding as finding:
        raise SetupError(str(finding)) from None


def check_names(assignments):
    """Raises SetupError, before minutes are spent, for a SET with a name that no notebook declares."""
    from kvlab import declarations  # the standard library alone

    try:
        known = declarations.all_declared()
        for name in declarations.written_assignments(assignments):
            declarations.check_name(name, known)
    except declarations.ParameterError as error:
        raise SetupError(f"SET: {error}" if "SET" not in str(error) else str(error)) from None


def interpreter(stack):
    """Returns the path of an interpreter that has everything, after building its environment where needed."""
    folder, lock = ROOT / FOLDERS[stack], ROOT / "requirements" / f"{stack}.txt"
    if active_environment(os.environ, sys.prefix, sysconfig.get_paths()["purelib"], folder):
        return sys.executable
    check_interpreter()
    check_names(os.environ.get("SET", ""))
    with one_at_a_time(lock):
        build(folder, lock, stack)
    return str(folder / "bin/python")


def main():
    """Prints the interpreter's path; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    locks = [*sorted(FOLDERS), "auto"]
    parser.add_argument("--lock", choices=locks, default="cpu", help="which lock to install; auto: as $PROFILE needs")
    asked = parser.parse_args().lock
    sys.path.insert(0, str(ROOT))
    try:
        stack = stack_of(os.environ.get("PROFILE", "cpu")) if asked == "auto" else asked
        python = interpreter(stack)
    except SetupError as problem:
        say(problem)
        return 2
    except KeyboardInterrupt:
        say("set-up was interrupted: the same command starts it again")
        return 130
    if stack == "cpu":
        compiler_found = any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "c++", "clang++")))
        for sentence in notices(has_library("libnuma.so.1"), compiler_found):
            say(sentence)
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
