"""Other serving benchmarks as programs of their own: told to send a load, asked for each request's TTFT and TPOT.

vLLM's is the one of the running environment; the others are installed by pip, once, into environments under
`~/.cache/kvlab/peers`, and only when they are asked for by name. Each reports in its own words; what is read here is
its own number per request, in seconds.
"""

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvlab import paths
from kvlab.measure import server

VLLM = (
    "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
    "serve.add_cli_args(parser); serve.main(parser.parse_args())"
)
PINNED = {"aiperf": "aiperf==0.13.0", "guidellm": "guidellm==0.8.0"}
NAMES = ("vllm", *PINNED)


@dataclass(frozen=True)
class Load:
    """What a peer is to send: a closed loop of `streams`, starting spread over `spread_s` or, with 0, at once."""

    base_url: str
    model: str
    tokenizer: Path
    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    spread_s: float = 0.0

    @property
    def rate_per_s(self):
        return self.streams / self.spread_s if self.spread_s else None


@dataclass(frozen=True)
class Result:
    """What a peer said of each request, in seconds, and the CPU seconds of its processes, start included."""

    ttft_s: list
    tpot_s: list
    cpu_s: float


def run(name, load, folder):
    """One run of a peer; its files go to `folder`. Raises RuntimeError with its last words where it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    command = {"vllm": vllm_command, "aiperf": aiperf_command, "guidellm": guidellm_command}[name](load, folder)
    variables = os.environ | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    variables["OPENAI_API_KEY"] = os.environ.get(server.TOKEN_VARIABLE, "")  # where they look for a server's token
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=variables)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}: {(folder / 'log').read_text()[-1500:]}")
    ttft_s, tpot_s = {"vllm": read_vllm, "aiperf": read_aiperf, "guidellm": read_guidellm}[name](folder)
    return Result(ttft_s, tpot_s, usage.ru_utime + usage.ru_stime)


def program(name):
    """The peer's console script, installed on first use."""
    folder = paths.cache() / "peers" / name
    script = folder / "bin" / name
    if not script.exists():
        venv.create(folder, with_pip=True)
        needs = [PINNED[name]]
        if name == "guidellm":  # with torch: this environment's release, so that pip takes the build it has here
            needs.append(f"torch=={metadata.version('torch').partition('+')[0]}")
        subprocess.run([folder / "bin" / "pip", "install", "-q", *needs], check=True)
    return script


def vllm_command(load, folder):
    command = [sys.executable, "-c", VLLM, "--backend", "openai", "--base-url", load.base_url, "--model", load.model]
    command += ["--tokenizer", load.tokenizer, "--dataset-name", "random", "--random-input-len", load.prompt_tokens]
    command += ["--random-output-len", load.output_tokens, "--num-prompts", load.requests, "--ignore-eos"]
    command += ["--max-concurrency", load.streams, "--disable-tqdm", "--temperature", 0]
    command += ["--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "result.json"]
    return command + (["--request-rate", load.rate_per_s, "--burstiness", 1000] if load.rate_per_s else [])


def read_vllm(folder):
    said = json.loads((folder / "result.json").read_text())
    gaps = zip(said["itls"], said["output_lens"])
    return said["ttfts"], [sum(each) / (tokens - 1) for each, tokens in gaps if tokens > 1]


def aiperf_command(load, folder):
    command = [program("aiperf"), "profile", "--model-names", load.model, "--url", load.base_url, "--streaming"]
    command += ["--endpoint-type", "completions", "--tokenizer", load.tokenizer, "--artifact-dir", folder]
    command += ["--synthetic-input-tokens-mean", load.prompt_tokens, "--output-tokens-mean", load.output_tokens]
    command += ["--extra-inputs", "ignore_eos:true", "--concurrency", load.streams, "--request-count", load.requests]
    command += ["--ui", "none", "--use-server-token-count"]
    return command + (["--request-rate", load.rate_per_s, "--arrival-pattern", "constant"] if load.rate_per_s else [])


def read_aiperf(folder):
    lines = (folder / "profile_export.jsonl").read_text().splitlines()
    said = [json.loads(line)["metrics"] for line in lines]
    names = ("time_to_first_token", "inter_token_latency")
    return tuple([each[name]["value"] / 1000 for each in said if name in each] for name in names)


def guidellm_command(load, folder):
    backend = f"kind=openai_http,target={load.base_url},model={load.model},request_format=/v1/completions"
    profile = f"kind=concurrent,streams={load.streams},rampup_duration={load.spread_s}"
    data = f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    command = [program("guidellm"), "run", "--backend", backend, "--profile", profile, "--data", data]
    command += ["--constraint", f"kind=max_requests,count={load.requests}", "--disable-console"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"]
    return command + ["--output", f"kind=json,path={folder / 'result.json'}"]


def read_guidellm(folder):
    (benchmark,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    said = benchmark["requests"]["successful"]
    names = ("time_to_first_token_ms", "inter_token_latency_ms")
    return tuple([each[name] / 1000 for each in said if each.get(name)] for name in names)
