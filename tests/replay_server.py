"""A server that replays streams at their times and logs when it really wrote; a process of its own.

`python replay_server.py FILE`: FILE is a JSON list of scripts, and a request whose prompt begins with token i
gets the i-th, one in words the first: {"status", "headers", "writes": [[ms, base64]], "close": "clean", "reset"
or "hang"}; with status 0 none.
GET /log: [{"script", "received_s", "write_times_s", "body", "headers"}], clock: time.perf_counter.
"""

import asyncio
import base64
import json
import socket
import struct
import sys
import time
from contextlib import suppress

LOG = []
METRICS = "vllm:kv_cache_usage_perc 0.25\nvllm:num_requests_running 1\nvllm:generation_tokens_total %d\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]})


def head(status, headers):
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def read_request(reader):
    block = await reader.readuntil(b"\r\n\r\n")
    first, *lines = block.decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return first.split()[1], headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def replay(script, entry, writer):
    if not script["status"]:
        return
    framing = {"connection": "close", "transfer-encoding": "chunked"}
    writer.write(head(script["status"], {**script["headers"], **framing}))
    await write_on_time(script["writes"], entry, writer)
    if script["close"] == "clean":
        writer.write(b"0\r\n\r\n")
    elif script["close"] == "hang":
        await asyncio.sleep(3600)
    elif script["close"] == "reset":
        await asyncio.sleep(0.02)
        linger = struct.pack("ii", 1, 0)  # closing now sends a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


async def write_on_time(writes, entry, writer):
    """Each write at its time, by a timer and nothing more: hundreds of streams go on beside this one."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    ahead_s = loop.time() - time.perf_counter()  # the loop's clock may differ from the log's

    def write(number):
        entry["write_times_s"].append(time.perf_counter())
        writer.write(writes[number][1])
        schedule(number + 1)

    def schedule(number):
        if number == len(writes):
            ended.set()
        else:
            loop.call_at(entry["received_s"] + ahead_s + writes[number][0] / 1000, write, number)

    schedule(0)
    await ended.wait()
    await writer.drain()


def framed(content):
    return b"%x\r\n%s\r\n" % (len(content), content) if content else b""


async def serve(scripts, reader, writer):
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        path, headers, body = await read_request(reader)
        if path.endswith("/completions"):
            request = json.loads(body)
            first = request["prompt"][0]
            entry = {"script": first if isinstance(first, int) else 0, "received_s": time.perf_counter()}
            entry["write_times_s"] = []
            entry |= {"body": request, "headers": headers}
            LOG.append(entry)
            await replay(scripts[entry["script"]], entry, writer)
        else:
            content = {"/log": json.dumps(LOG), "/v1/models": MODELS}.get(path, METRICS % len(LOG)).encode()
            writer.write(head(200, {"content-length": len(content)}) + content)
            await writer.drain()
    writer.close()


async def main(path):
    with open(path) as file:
        scripts = json.load(file)
    for script in scripts:
        script["writes"] = [(at_ms, framed(base64.b64decode(content))) for at_ms, content in script["writes"]]
    server = await asyncio.start_server(
        lambda reader, writer: serve(scripts, reader, writer), "127.0.0.1", 0, limit=2**24, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
