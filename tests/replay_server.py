"""A server that replays streams at their times and logs when it really wrote; a process of its own.

`python replay_server.py FILE [LOOP]`: FILE is a JSON list of scripts, and a request whose prompt begins with token i
gets the i-th, one in words the first: {"status", "headers", "writes": [[ms, base64]], "close": "clean", "reset"
or "hang"}; with status 0 none. LOOP "uvloop" makes room for thousands of writes a second on one slow core.
GET /log: [{"script", "received_s", "write_times_s", "body", "headers"}], clock: time.perf_counter.
"""

import asyncio
import base64
import gc
import json
import socket
import struct
import sys
import time

LOG = []
METRICS = "vllm:kv_cache_usage_perc 0.25\nvllm:num_requests_running 1\nvllm:generation_tokens_total %d\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]})


def head(status, headers):
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Connection(asyncio.Protocol):
    """One request; each write of its script goes out by a timer and nothing more: hundreds go on beside it."""

    def __init__(self, scripts):
        self.scripts, self.received, self.ended = scripts, b"", False

    def connection_made(self, transport):
        self.transport, self.loop = transport, asyncio.get_running_loop()

    def connection_lost(self, error):
        self.ended = True

    def data_received(self, data):
        self.received += data
        block, blank, body = self.received.partition(b"\r\n\r\n")
        first, *lines = block.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if blank and len(body) >= int(headers.get("content-length", 0)):
            self.answer(first.split()[1], headers, body, time.perf_counter())

    def answer(self, path, headers, body, received_s):
        if not path.endswith("/completions"):
            content = json.dumps(LOG) if path == "/log" else MODELS if path == "/v1/models" else METRICS % len(LOG)
            self.transport.write(head(200, {"content-length": len(content)}) + content.encode())
            self.transport.close()
            return
        request = json.loads(body)
        token = request["prompt"][0]
        number = token if isinstance(token, int) else 0
        entry = {"script": number, "received_s": received_s, "write_times_s": [], "body": request, "headers": headers}
        LOG.append(entry)
        self.write_times_s, self.script, self.next = entry["write_times_s"], self.scripts[number], 0
        if self.script["status"]:
            framing = {"connection": "close", "transfer-encoding": "chunked"}
            self.transport.write(head(self.script["status"], {**self.script["headers"], **framing}))
            self.start_s = received_s + self.loop.time() - time.perf_counter()  # the loop's clock may differ
            self.schedule()
        else:
            self.transport.close()

    def schedule(self):
        if self.next < len(self.script["writes"]):
            self.loop.call_at(self.start_s + self.script["writes"][self.next][0] / 1000, self.write)
        elif self.script["close"] == "reset":
            self.loop.call_later(0.02, self.reset)
        elif self.script["close"] != "hang":
            self.transport.write(b"0\r\n\r\n" if self.script["close"] == "clean" else b"")
            self.transport.close()

    def write(self):
        if not self.ended:
            self.write_times_s.append(time.perf_counter())
            self.transport.write(self.script["writes"][self.next][1])
            self.next += 1
            self.schedule()

    def reset(self):
        linger = struct.pack("ii", 1, 0)  # closing now sends a reset
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.close()


def framed(content):
    return b"%x\r\n%s\r\n" % (len(content), content) if content else b""


async def main(path):
    with open(path) as file:
        scripts = json.load(file)
    for script in scripts:
        script["writes"] = [(at_ms, framed(base64.b64decode(content))) for at_ms, content in script["writes"]]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(scripts), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    gc.disable()
    if "uvloop" in sys.argv[2:]:
        import uvloop

        uvloop.run(main(sys.argv[1]))
    else:
        asyncio.run(main(sys.argv[1]))
