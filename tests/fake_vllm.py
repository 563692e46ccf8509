"""Stands in for vLLM's server where a test needs one that starts at once or fails in a chosen way.

`python fake_vllm.py --fake MODE` and vLLM's own arguments. It has a child that ignores SIGTERM, as an engine
may. Modes: ok; those of LAST_WORDS: it ends with what vLLM says then; slow: lists its models, makes tokens
after two seconds; never: no token at all; deaf: does not end on SIGTERM either;
stubborn: nor does it, and its child is in a session of its own.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LAST_WORDS = {
    "kv": "ValueError: To serve at least one request with the model's max seq len (8192), (0.7 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (0.2 GiB). Based on the available "
    "memory, the estimated maximum model length is 2912. Try increasing `gpu_memory_utilization`.",
    "kv-old": "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that "
    "can be stored in KV cache (19232). Try increasing `gpu_memory_utilization`.",
    "kv-none": "ValueError: To serve at least one request with the model's max seq len (64), (0.7 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (0.0 GiB). Try increasing it",
    "context": "User-specified max_model_len (9000) is greater than the derived max_model_len "
    "(max_position_embeddings=8192 or model_max_length=None in model's config.json).",
    "memory": "ValueError: Available memory on node 0 (2.1/3.0 GiB) on kv cache allocation is less than",
    "arguments": "api_server.py: error: unrecognized arguments: --no-such-thing",
    "library": "ImportError: libnuma.so.1: cannot open shared object file: No such file or directory",
}
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
parser = argparse.ArgumentParser()
parser.add_argument("--fake", default="ok")
parser.add_argument("--port", type=int)
parser.add_argument("--served-model-name", nargs="+")
options, _ = parser.parse_known_args()
started_s = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, payload, status=200):
        content = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def may_ask(self):
        return self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"

    def do_GET(self):
        if self.path.startswith("/v1") and not self.may_ask():
            return self.answer({"error": "Unauthorized"}, 401)
        names = options.served_model_name
        self.answer({"data": [{"id": name} for name in names]} if self.path == "/v1/models" else {})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.may_ask():
            return self.answer({"error": "Unauthorized"}, 401)
        if options.fake == "never":
            time.sleep(600)
        if options.fake == "slow":
            time.sleep(max(0.0, started_s + 2 - time.monotonic()))
        print("completion of", request["max_tokens"], flush=True)
        self.answer({"choices": [{"text": "a"}]})


def main():
    subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=options.fake == "stubborn")
    print("OMP threads on CPUs", os.environ.get("VLLM_CPU_OMP_THREADS_BIND"), flush=True)
    print("offline", os.environ.get("HF_HUB_OFFLINE"), os.environ.get("VLLM_NO_USAGE_STATS"), flush=True)
    if options.fake in LAST_WORDS:
        time.sleep(0.5)
        print("\n".join(f"line {i}" for i in range(50)))
        sys.exit(LAST_WORDS[options.fake])
    if options.fake in ("deaf", "stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("INFO CPU KV cache size: 11,648 tokens", flush=True)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
