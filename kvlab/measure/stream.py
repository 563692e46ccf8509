"""Reading a streamed answer after it has ended: bytes with their arrival times in, token arrivals out.

Nothing here runs while a measurement is going on. A read is (seconds, bytes), as the socket gave it. An
event's arrival is the time of the read that brought the blank line which completes it.
"""

import json
import re
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n|\Z)")
DELTA_TEXT = ("content", "reasoning", "reasoning_content", "refusal", "tool_calls", "function_call")
DETAIL_LENGTH = 300


@dataclass(frozen=True)
class Answer:
    """What one request brought back; times in seconds on the reads' clock; None for what was not said."""

    http_status: int | None = None
    arrival_times_s: list = field(default_factory=list)  # one per chunk that carries output tokens
    chunk_tokens: list = field(default_factory=list)  # tokens in each of those chunks, None where not told
    finished_s: float | None = None  # the event with the finish reason, else the last token's
    finish_reason: str | None = None
    done: bool = False  # the end marker came
    output_tokens: int | None = None
    token_count_source: str | None = None  # "usage" or "estimated"
    prompt_tokens: int | None = None
    text: str = ""
    error: str | None = None  # why it is no success, None for a success
    detail: str | None = None


class Chunk(NamedTuple):
    """One event that may carry tokens: its arrival, its text, the running count of tokens if it told one."""

    arrival_s: float
    text: str
    carries: bool
    count: int | None
    finish_reason: str | None


class Malformed(ValueError):
    """The bytes are not what HTTP or server-sent events allow."""


def parse(reads):
    """Turn the reads of one connection, in order, into an Answer; never raises for what a server sent."""
    try:
        status, headers, body, arrival_s = _response(reads)
    except Malformed as error:
        return Answer(error="connection", detail=str(error))
    if status != 200:
        return Answer(status, error=f"http_{status}", detail=_shorten(body))
    if (encoding := headers.get("content-encoding", "identity")) != "identity":
        return Answer(status, error="malformed", detail=f"compressed by {encoding}, which was not asked for")
    if headers.get("content-type", "").startswith("application/json"):
        error = "server_error" if b'"error"' in body else "not_streamed"
        return Answer(status, error=error, detail=_shorten(body))
    return replace(_read_events(body, arrival_s), http_status=status)


def body(reads):
    """(HTTP status, body) of a plain answer; (None, b"") where there was none."""
    try:
        status, _, content, _ = _response(reads)
    except Malformed:
        return None, b""
    return status, content


def _shorten(body):
    return body[:DETAIL_LENGTH].decode("utf-8", "replace")


# ---- HTTP/1.1


def _response(reads):
    """Return (status, headers, body, arrival_s), where arrival_s(i) is the arrival of the body's byte i."""
    raw = b"".join(data for _, data in reads)
    ends = list(accumulate(len(data) for _, data in reads))
    start, status, headers = 0, 100, {}
    while 100 <= status < 200:  # interim answers precede the real one
        end = raw.find(b"\r\n\r\n", start)
        if end < 0:
            raise Malformed("closed before an answer" if not raw[start:] else "closed within the headers")
        status, headers = _head(raw[start:end])
        start = end + 4
    chunked = "chunked" in headers.get("transfer-encoding", "").lower()
    pieces = _chunks(raw, start) if chunked else [(start, len(raw))]
    body = b"".join(raw[first:last] for first, last in pieces)
    body_ends = list(accumulate(last - first for first, last in pieces))

    def arrival_s(index):
        piece = bisect_left(body_ends, index + 1)
        offset = pieces[piece][1] - (body_ends[piece] - index)
        return reads[bisect_left(ends, offset + 1)][0]

    return status, headers, body, arrival_s


def _head(block):
    first, *lines = block.decode("latin-1").split("\r\n")
    match = re.match(r"HTTP/1\.\d (\d{3})", first)
    if not match:
        raise Malformed(f"not an HTTP answer: {first[:60]!r}")
    fields = (line.partition(":") for line in lines)
    return int(match[1]), {name.strip().lower(): value.strip() for name, _, value in fields}


def _chunks(raw, start):
    """(first, last) offsets of each chunk of a chunked body; one cut off counts as far as it came."""
    pieces = []
    while (line_end := raw.find(b"\r\n", start)) >= 0:
        try:
            size = int(raw[start:line_end].split(b";")[0], 16)
        except ValueError:
            break
        if size == 0:
            break
        first = line_end + 2
        pieces.append((first, min(first + size, len(raw))))
        start = first + size + 2
    return pieces


# ---- server-sent events


def _events(body, arrival_s):
    """Yield (name, data, arrival in seconds) per event, by the standard's rules for lines and fields.

    Unlike there, a last event without its blank line counts.
    """
    name, lines = "", []
    for match in LINE.finditer(body, 3 if body.startswith(b"\xef\xbb\xbf") else 0):
        key, _, value = match[1].partition(b":")
        if key == b"data":
            lines.append(value[1:] if value.startswith(b" ") else value)
        elif key == b"event":
            name = value.strip().decode("utf-8", "replace")
        if lines and (not match[1] or match.end() == len(body)):
            last = min(match.start(2), len(body) - 1)  # the first byte of the line end completes it
            yield name, b"\n".join(lines).decode("utf-8", "replace"), arrival_s(last)
        if not match[1]:
            name, lines = "", []
        if match.end() == len(body):
            return


def _read_events(body, arrival_s):
    chunks, prompt_tokens, total, done = [], None, None, False
    problem = {}
    for name, data, at_s in _events(body, arrival_s):
        if data.strip() == "[DONE]":
            done = True
            break
        try:
            event = json.loads(data)
        except ValueError:
            problem = {"error": "malformed", "detail": data[:DETAIL_LENGTH]}
            continue
        message = _error_message(name, event)
        if message is not None:
            problem = {"error": "server_error", "detail": message[:DETAIL_LENGTH]}
            break
        usage = _object(event.get("usage"))
        count = usage.get("completion_tokens")
        count = count if isinstance(count, int) else None
        total = total if count is None else count
        prompt_tokens = usage.get("prompt_tokens") or prompt_tokens
        choices = event.get("choices")
        if isinstance(choices, list) and choices:
            chunks.append(_chunk(choices, count, at_s))
    answer = _count(chunks, total)
    finished = answer.finish_reason is not None or done
    if problem.get("error") == "malformed" and not finished:
        problem = {"error": "truncated", "detail": problem["detail"]}
    elif not problem and not finished:
        problem = {"error": "truncated", "detail": "the stream ended without finish reason and end marker"}
    return replace(answer, prompt_tokens=prompt_tokens, done=done, **problem)


def _error_message(name, event):
    """The words of an error event ({"error": ...}, {"object": "error"}, `event: error`), else None."""
    if not isinstance(event, dict):
        return f"not an object: {event!r}"
    if not (event.get("error") or event.get("object") == "error" or name == "error"):
        return None
    error = event.get("error") or event
    return str(_object(error).get("message", error))


def _object(value):
    return value if isinstance(value, dict) else {}


def _chunk(choices, count, at_s):
    parts, finish_reason = [], None
    for choice in map(_object, choices):
        delta = _object(choice.get("delta"))
        parts += [delta[key] for key in DELTA_TEXT if delta.get(key)]
        parts.append(choice.get("text"))
        finish_reason = choice.get("finish_reason") or finish_reason
    text = "".join(part for part in parts if isinstance(part, str))
    return Chunk(at_s, text, any(parts), count, finish_reason)


def _count(chunks, total):
    """Decide which chunks carry tokens and how many; `total` is the last usage, None without one."""
    running = _running_counts(chunks)
    if running:
        counts = [0] + [count for _, count in running]
        pairs = zip(running, counts, strict=False)
        carriers = [(chunk, now - before) for (chunk, now), before in pairs if now > before]
    else:
        carriers = [(chunk, None) for chunk in chunks if chunk.carries]
    if len(carriers) == 1 and not carriers[0][0].carries and carriers[0][0].finish_reason == "stop":
        carriers = []  # an end marker that came alone: a token, but no first token to see
    arrivals_s = [chunk.arrival_s for chunk, _ in carriers]
    finish = next((chunk for chunk in chunks if chunk.finish_reason), None)
    finished_s = finish.arrival_s if finish else (arrivals_s[-1] if arrivals_s else None)
    told = total is not None and (total > 0 or not carriers)
    return Answer(
        arrival_times_s=arrivals_s,
        chunk_tokens=[tokens for _, tokens in carriers],
        finished_s=finished_s,
        finish_reason=finish.finish_reason if finish else None,
        output_tokens=total if told else (len(carriers) or None),
        token_count_source="usage" if told else "estimated",
        text="".join(chunk.text for chunk in chunks),
    )


def _running_counts(chunks):
    """[(chunk, tokens so far)] if every chunk with text told a count above zero that never falls, else []."""
    counted = [(chunk, chunk.count) for chunk in chunks if chunk.count is not None]
    counts = [count for _, count in counted]
    if any(chunk.carries and not chunk.count for chunk in chunks) or counts != sorted(counts):
        return []
    return counted
