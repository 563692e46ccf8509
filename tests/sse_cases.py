"""Streams as servers have been seen to send them, and what a client must make of each.

A write is (milliseconds after the request, bytes). Times in `expect` are milliseconds too.
"""

import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One answer of a server: its writes, how the connection ends, and the values that are right."""

    writes: list
    expect: dict
    close: str = "clean"  # "clean", "reset" or "hang"
    http_status: int = 200
    headers: dict = field(default_factory=lambda: {"content-type": "text/event-stream"})


def data(payload):
    """One event with a JSON payload."""
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def usage(output_tokens, prompt_tokens=8):
    return {"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}}


def text(content, finish=None, **more):
    """One event of the completions API."""
    return data({"choices": [{"index": 0, "text": content, "finish_reason": finish}], **more})


def delta(finish=None, more=None, **fields):
    """One event of the chat API."""
    return data({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}], **(more or {})})


DONE = b"data: [DONE]\n\n"


def closing(output_tokens, at_ms, **choices):
    """The usage event and the end marker."""
    return [(at_ms, data({**choices, **usage(output_tokens)})), (at_ms + 1, DONE)]


def late_usage(**choices):
    writes = [(50, text("a")), (60, text("b")), (70, text("c", "length")), *closing(3, 400, **choices)]
    return Case(writes, {"output_tokens": 3, "ttft": 50, "tpot": 10, "e2e": 70, "chunks": 3})


def reasoning(key, shown=5):
    hidden = [(50 + 10 * i, delta(**{key: "h"})) for i in range(25 - shown)]
    last = [(50 + 10 * i, delta("stop" if i == 24 else None, content="x")) for i in range(25 - shown, 25)]
    writes = [(10, delta(role="assistant", content="")), *hidden, *last]
    if not shown:
        writes.append((295, delta("stop")))
    return Case([*writes, *closing(25, 300)], {"output_tokens": 25, "ttft": 50, "tpot": 10, "chunks": 25})


FOUR = [("w x y z ", "length" if i == 9 else None) for i in range(10)]
CUT = [(40 + 10 * i, text("a")) for i in range(1, 5)]
CHINESE = data({"choices": [{"index": 0, "text": "中文缓存", "finish_reason": "length"}]})
CHINESE = CHINESE.decode("unicode-escape").encode() if b"\\u" in CHINESE else CHINESE

CASES = {
    "finish_without_done": Case(
        [(50, text("a")), (60, text("b", "length", **usage(2)))], {"output_tokens": 2, "ttft": 50, "tpot": 10}
    ),
    "four_tokens_per_chunk": Case(
        [(100 + 100 * i, text(*args)) for i, args in enumerate(FOUR)] + closing(40, 1001, choices=[]),
        {"output_tokens": 40, "ttft": 100, "tpot": 900 / 39, "chunks": 10, "chunk_tokens": [None] * 10},
    ),
    "four_tokens_per_chunk_running_usage": Case(
        [(100 + 100 * i, text(*args, **usage(4 + 4 * i))) for i, args in enumerate(FOUR)] + [(1002, DONE)],
        {"output_tokens": 40, "ttft": 100, "tpot": 900 / 39, "chunks": 10, "chunk_tokens": [4] * 10},
    ),
    "keepalive_comments": Case(
        [(100, b":\n\n"), (300, b": ping\n\n"), (500, b": ping\n\n"), (800, text("a")),
         (820, text("b", "length")), *closing(2, 820, choices=[])],
        {"output_tokens": 2, "ttft": 800, "tpot": 20, "chunks": 2},
    ),
    "huge_event": Case(
        [(50, text("a" * 300_000)), (60, text("b", "length")), *closing(2, 61, choices=[])],
        {"output_tokens": 2, "ttft": 50, "tpot": 10, "text_length": 300_001},
    ),
    "no_usage_early_stop": Case(
        [(50 + 5 * i, text("a ", "stop" if i == 23 else None)) for i in range(24)] + [(170, DONE)],
        {"output_tokens": 24, "ttft": 50, "tpot": 5, "token_count_source": "estimated", "chunks": 24},
    ),
    "one_token": Case(
        [(80, text("a", "length")), *closing(1, 81, choices=[])],
        {"output_tokens": 1, "ttft": 80, "tpot": None, "e2e": 80},
    ),
    "one_token_no_text": Case(
        [(80, text("", "stop")), *closing(1, 81, choices=[])],
        {"output_tokens": 1, "ttft": None, "tpot": None, "e2e": 80},
    ),
    "one_token_no_text_usage_inside": Case(
        [(80, text("", "stop", **usage(1))), (82, DONE)],
        {"output_tokens": 1, "ttft": None, "tpot": None, "e2e": 80},
    ),
    "reasoning": reasoning("reasoning"),
    "reasoning_content": reasoning("reasoning_content"),
    "reasoning_only": reasoning("reasoning", shown=0),
    "split_utf8": Case(
        [(50, CHINESE[i : i + 1]) for i in range(len(CHINESE))] + closing(4, 60, choices=[]),
        {"output_tokens": 4, "ttft": 50, "text": "中文缓存", "chunks": 1},
    ),
    "usage_choices_empty": late_usage(choices=[]),
    "usage_choices_null": late_usage(choices=None),
    "usage_choices_missing": late_usage(),
    "truncated_clean": Case(CUT, {"status": "failed", "reason": "truncated"}),
    "truncated_reset": Case(CUT, {"status": "failed", "reason": "connection"}, close="reset"),
    "hang": Case(CUT, {"status": "timeout", "reason": "timeout"}, close="hang"),
    "no_answer": Case([], {"status": "failed", "reason": "connection"}, http_status=0),
    "reset_after_finish": Case(
        [(50, text("a", **usage(1))), (60, text("b", "length", **usage(2)))],
        {"output_tokens": 2, "ttft": 50, "tpot": 10}, close="reset",
    ),
    "http_429": Case(
        [(5, b"{}")], {"status": "failed", "reason": "http_429"}, http_status=429,
        headers={"content-type": "application/json", "retry-after": "1"},
    ),
    "http_500": Case([(5, b"")], {"status": "failed", "reason": "http_500"}, http_status=500, headers={}),
    "http_503": Case(
        [(5, b'{"error": {"message": "overloaded"}}')], {"status": "failed", "reason": "http_503"},
        http_status=503, headers={"content-type": "application/json"},
    ),
    "error_in_the_stream": Case(
        [(50, text("a")), (60, data({"error": {"message": "engine is dead", "code": 500}})), (61, DONE)],
        {"status": "failed", "reason": "server_error"},
    ),
    "error_by_name": Case(
        [(50, text("a")), (60, b'event: error\ndata: {"message": "engine is dead"}\n\n'), (61, DONE)],
        {"status": "failed", "reason": "server_error"},
    ),
    "error_as_object": Case(
        [(60, data({"object": "error", "message": "too long", "code": 400})), (61, DONE)],
        {"status": "failed", "reason": "server_error"},
    ),
    "no_error": Case(
        [(50, text("a", error=None)), (60, text("b", "length", error=None)), *closing(2, 61, choices=[])],
        {"output_tokens": 2, "ttft": 50, "tpot": 10},
    ),
    "heartbeats_without_data": Case(
        [(10, b"data:\n\n"), (20, b"event: ping\ndata: now\n\n"), (30, b"data\n\n"), (50, text("a")),
         (55, b"data: \n\n"), (60, text("b", "length")), *closing(2, 61, choices=[])],
        {"output_tokens": 2, "ttft": 50, "tpot": 10, "chunks": 2},
    ),
    "usage_of_each_chunk_alone": Case(
        [(50 + 10 * i, text("a", "length" if i == 4 else None, **usage(1))) for i in range(5)]
        + closing(5, 91, choices=[]),
        {"output_tokens": 5, "ttft": 50, "tpot": 10, "chunks": 5, "chunk_tokens": [None] * 5},
    ),
    "two_choices_in_one_event": Case(
        [(50, data({"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}], **usage(2)})),
         (60, data({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}, {"index": 1, "text": "c",
                    "finish_reason": "length"}], **usage(3)})), (61, DONE)],
        {"output_tokens": 3, "ttft": 50, "tpot": 5, "chunks": 2, "chunk_tokens": [2, 1]},
    ),
    "finish_alone": Case(
        [(50, delta(content="a")), (60, delta(content="b")), (90, delta("stop")), *closing(2, 91, choices=[])],
        {"output_tokens": 2, "ttft": 50, "tpot": 10, "e2e": 60, "chunks": 2},
    ),
    "thoughts_in_parts": Case(
        [(50, delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "h"}]}])),
         (60, delta("stop", content="b")), *closing(2, 61, choices=[])],
        {"output_tokens": 2, "ttft": 50, "tpot": 10, "chunks": 2},
    ),
    "aborted_by_the_engine": Case(
        [(50, text("a")), (60, text("", "abort")), (61, DONE)], {"status": "failed", "reason": "server_error"}
    ),
    "error_in_words": Case(
        [(50, text("a")), (60, b"event: error\ndata: engine is dead\n\n")],
        {"status": "failed", "reason": "server_error"},
    ),
    "page_instead_of_a_stream": Case(
        [(20, b"<html>welcome</html>")], {"status": "failed", "reason": "not_streamed"},
        headers={"content-type": "text/html"},
    ),
    "stream_under_another_type": Case(
        [(50, text("a")), (60, text("b", "length")), *closing(2, 61, choices=[])],
        {"output_tokens": 2, "ttft": 50, "tpot": 10}, headers={"content-type": "application/json"},
    ),
    "redirect": Case([], {"status": "failed", "reason": "http_302"}, http_status=302, headers={"location": "/"}),
    "not_streamed": Case(
        [(60, b'{"choices": [{"text": "a b", "finish_reason": "length"}]}')],
        {"status": "failed", "reason": "not_streamed"}, headers={"content-type": "application/json"},
    ),
}  # fmt: skip
