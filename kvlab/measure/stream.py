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

import msgspec

DELTA_TEXT = ("content", "reasoning", "reasoning_content", "refusal", "tool_calls", "function_call")
DETAIL_LENGTH = 300
CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]+)[ \t]*(?:;[^\r\n]*)?\r\n")
LAST_CHUNK = re.compile(rb"(?:\A|\r\n)0+[ \t]*(?:;[^\r\n]*)?\r\n(?:[^\r\n]+\r\n)*\r\n\Z")  # trailers may follow
SHORT = 64  # bytes; an event with its framing is longer
TAIL_LENGTH = 1024  # bytes in which the last chunk with its trailers has to fit
UNFINISHED = ("abort", "error", "cancelled")  # finish reasons of an answer that is not whole


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


class End:
    """Tells, read by read and at next to no cost, when an answer is whole though its connection stays open."""

    def __init__(self):
        self._start, self._tail, self._left, self._chunked = b"", b"", None, None

    def came(self, data):
        """True if the answer ends with these bytes; an answer without any framing ends with its connection."""
        if self._chunked is None:
            self._start += data
            try:
                status, headers, start = _answer_head(self._start)
            except Malformed:
                return False
            self._chunked, data = _is_chunked(headers), self._start[start:]
            length = "0" if status in (204, 304) else headers.get("content-length", "")
            self._left = int(length) if length.isdecimal() and not self._chunked else None
        if self._chunked:
            ends = data.endswith(b"\r\n\r\n")
            if ends or len(data) < SHORT:  # joined only where the end may have been cut in pieces
                data = self._tail[-TAIL_LENGTH:] + data
                ends = data.endswith(b"\r\n\r\n")
            self._tail = data
            return ends and LAST_CHUNK.search(data) is not None
        if self._left is not None:
            self._left -= len(data)
        return self._left is not None and self._left <= 0


def parse(reads):
    """Turn the reads of one connection, in order, into an Answer; never raises for what a server sent."""
    try:
        status, headers, body, arrival_s = _response(reads)
    except Malformed as error:
        return Answer(error="connection", detail=str(error))
    if status != 200:
        return Answer(status, error=f"http_{status}", detail=_shorten(body))
    if (encoding := headers.get("content-encoding", "identity").lower()) != "identity":
        return Answer(status, error="malformed", detail=f"compressed by {encoding}, which was not asked for")
    if body.lstrip()[:1] in (b"{", b"[", b"<"):  # JSON or a page: no line of an event stream begins so
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
    text = body if isinstance(body, str) else body.decode("utf-8", "replace")
    return text[:DETAIL_LENGTH].encode("utf-8", "replace").decode()  # JSON may smuggle in half a character


# ---- HTTP/1.1


def _response(reads):
    """Return (status, headers, body, arrival_s), where arrival_s(i) is the arrival of the body's byte i."""
    raw = b"".join(data for _, data in reads)
    ends = list(accumulate(len(data) for _, data in reads))
    status, headers, start = _answer_head(raw)
    pieces = _chunks(raw, start) if _is_chunked(headers) else [(start, len(raw))]
    body = b"".join(raw[first:last] for first, last in pieces)
    body_ends = list(accumulate(last - first for first, last in pieces))

    def arrival_s(index):
        piece = bisect_left(body_ends, index + 1)
        offset = pieces[piece][1] - (body_ends[piece] - index)
        return reads[bisect_left(ends, offset + 1)][0]

    return status, headers, body, arrival_s


def _answer_head(raw):
    """(status, headers, offset of the body) of the first answer that is not an interim one."""
    start, status, headers = 0, 100, {}
    while 100 <= status < 200:
        end = raw.find(b"\r\n\r\n", start)
        if end < 0:
            raise Malformed("closed within the headers" if raw[start:] else "closed before an answer")
        status, headers = _head(raw[start:end])
        start = end + 4
    return status, headers, start


def _is_chunked(headers):
    return "chunked" in headers.get("transfer-encoding", "").lower()


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
    while (line := CHUNK_SIZE.match(raw, start)) and (size := int(line[1], 16)):
        first = line.end()
        pieces.append((first, min(first + size, len(raw))))
        start = first + size + 2
    return pieces


# ---- server-sent events


def _events(body, arrival_s):
    """Yield (name, data, arrival in seconds) per event, by the standard's rules for lines and fields.

    Unlike there, a last event without its blank line counts.
    """
    name, lines, end = "", [], 3 if body.startswith(b"\xef\xbb\xbf") else 0
    for line in body[end:].splitlines(keepends=True):
        content = line.rstrip(b"\r\n")
        first, end = end + len(content), end + len(line)
        key, _, value = content.partition(b":")
        if key == b"data":
            lines.append(value[1:] if value.startswith(b" ") else value)
        elif key == b"event":
            name = value.strip().decode("utf-8", "replace")
        if lines and (not content or end == len(body)):
            last = min(first, len(body) - 1)  # the first byte of the line end completes it
            yield name, b"\n".join(lines).decode("utf-8", "replace"), arrival_s(last)
        if not content:
            name, lines = "", []


def _read_events(body, arrival_s):
    chunks, prompt_tokens, total, done = [], None, None, False
    problem = {}
    for name, data, at_s in _events(body, arrival_s):
        if data.strip() == "[DONE]":
            done = True
            break
        if not data.strip():  # a heartbeat
            continue
        try:
            event = _json(data)
        except (ValueError, RecursionError):
            if name in ("", "message", "error"):  # events of other names are nobody's tokens
                error = "server_error" if name == "error" else "malformed"
                problem = {"error": error, "detail": _shorten(data)}
            continue
        message = _error_message(name, event)
        if message is not None:
            problem = {"error": "server_error", "detail": _shorten(message)}
            break
        usage = _object(event.get("usage"))
        count = _count_in(usage, "completion_tokens")
        total = total if count is None else count
        prompt_tokens = _count_in(usage, "prompt_tokens") or prompt_tokens
        choices = event.get("choices")
        if isinstance(choices, list) and choices:
            chunks.append(_chunk(choices, count, at_s))
    answer = _count(chunks, total)
    finished = answer.finish_reason is not None or done
    if problem.get("error") == "malformed" and not finished:
        problem = {"error": "truncated", "detail": problem["detail"]}
    elif not problem and answer.finish_reason in UNFINISHED:
        problem = {"error": "server_error", "detail": f"it gave up: {answer.finish_reason}"}
    elif not problem and not finished:
        problem = {"error": "truncated", "detail": "the stream ended without finish reason and end marker"}
    return replace(answer, prompt_tokens=prompt_tokens, done=done, **problem)


def _json(data):
    """What `json.loads` gives, in less time; what msgspec refuses (NaN, half a character) is left to it."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return json.loads(data)


def _error_message(name, event):
    """The words of an error event ({"error": ...}, {"object": "error"}, `event: error`), else None."""
    if not isinstance(event, dict):
        return f"not an object: {event!r}"
    if not (event.get("error") or event.get("object") == "error" or name == "error"):
        return None
    error = event.get("error") or event
    return str(_object(error).get("message", error))


def _count_in(usage, name):
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None


def _object(value):
    return value if isinstance(value, dict) else {}


def _chunk(choices, count, at_s):
    parts, finish_reason = [], None
    for choice in map(_object, choices):
        if delta := _object(choice.get("delta")):
            parts += map(delta.get, DELTA_TEXT)
        parts.append(choice.get("text"))
        finish_reason = choice.get("finish_reason") or finish_reason
    text = "".join([part for part in parts if isinstance(part, str)])
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
        finish_reason=_shorten(str(finish.finish_reason)) if finish else None,
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
    per_chunk = len(counts) > 1 and counts[0] == counts[-1] < sum(chunk.carries for chunk in chunks)
    return [] if per_chunk else counted
