"""The plainest careful client on aiohttp, to hold ours against in the same minutes: what such a client costs here.

The clock starts when the request's headers have been sent; each piece is stored with its time, and read with `json`
after its stream has ended. No failures, no dialects, no warm-up of its own: it is a yardstick, not a client.
"""

import asyncio
import json
import time

import aiohttp
import uvloop


def run(base_url, prompts, streams, spread_s, output_tokens):
    """(TTFT, TPOT) in seconds of each prompt, in a closed loop of `streams` that start spread over `spread_s`."""
    return uvloop.run(_all(base_url, prompts, streams, spread_s, output_tokens))


async def _all(base_url, prompts, streams, spread_s, output_tokens):
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(_start_clock)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, trace_configs=[trace], timeout=timeout) as session:
        raw = [None] * len(prompts)

        async def stream(number):
            await asyncio.sleep(spread_s * number / streams)
            for index in range(number, len(prompts), streams):
                raw[index] = await _one(session, base_url, prompts[index], output_tokens)

        await asyncio.gather(*map(stream, range(streams)))
    return [_read(*each) for each in raw]


async def _start_clock(session, context, parameters):
    context.trace_request_ctx.append(time.perf_counter())


async def _one(session, base_url, prompt, output_tokens):
    body = {"model": "m", "prompt": prompt, "max_tokens": output_tokens, "stream": True}
    started, pieces = [], []
    async with session.post(f"{base_url}/v1/completions", json=body, trace_request_ctx=started) as answer:
        async for piece in answer.content.iter_any():
            pieces.append((time.perf_counter(), piece))
    return started[0], pieces


def _read(started_s, pieces):
    """Each event's time is that of the piece which ended it."""
    times_s, tokens, rest = [], [], b""
    for at_s, piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            if event != b"data: [DONE]" and (said := json.loads(event[6:]))["choices"]:
                times_s.append(at_s)
                tokens.append(said["usage"]["completion_tokens"])
    return times_s[0] - started_s, (times_s[-1] - times_s[0]) / (tokens[-1] - 1)
