"""A client that misreads a stream reports latencies that nobody had; so each dialect is read back here."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sse_cases import CASES, DONE, closing, data, delta, text, usage

from kvlab.measure import stream

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def reads_of(writes, head=OK):
    """(seconds, bytes) as a client would have got them, from writes in milliseconds."""
    return [(0.0, head)] + [(at_ms / 1000, content) for at_ms, content in writes]


def parse(*writes, head=OK):
    return stream.parse(reads_of(writes, head))


def chunked(content, extension=b""):
    return b"%x" % len(content) + extension + b"\r\n" + content + b"\r\n"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.http_status == 200])
def test_each_case_gives_its_counts(name):
    case = CASES[name]
    answer = parse(*case.writes, head=OK.replace(b"text/event-stream", case.headers["content-type"].encode()))
    expect = case.expect
    if expect.get("status", "ok") != "ok":
        assert answer.error == expect["reason"] if case.close == "clean" else answer.error == "truncated"
        return
    assert answer.error is None, answer
    assert answer.output_tokens == expect["output_tokens"]
    assert answer.token_count_source == expect.get("token_count_source", "usage")
    assert len(answer.arrival_times_s) == len(answer.chunk_tokens)
    if "ttft" in expect:
        ttft_s = answer.arrival_times_s[0] if answer.arrival_times_s else None
        assert ttft_s == (None if expect["ttft"] is None else pytest.approx(expect["ttft"] / 1000))
    if "chunk_tokens" in expect:
        assert answer.chunk_tokens == expect["chunk_tokens"]
    assert len(answer.arrival_times_s) == expect.get("chunks", len(answer.arrival_times_s))
    assert answer.text == expect.get("text", answer.text) and "\ufffd" not in answer.text
    assert len(answer.text) == expect.get("text_length", len(answer.text))


CONVERSATION = (
    b": hello\n\n" + text("中", **usage(1)) + text("文a", **usage(3)) + text("", "length", **usage(4)) + DONE
)


@given(st.lists(st.integers(0, 2000)), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans())
def test_br01_any_cut_of_the_bytes_gives_the_same_text_and_counts(cuts, line_end, framed):
    body = CONVERSATION.replace(b"\n", line_end)
    if framed:
        pieces = [body[i : i + 37] for i in range(0, len(body), 37)]
        raw = OK[:-2] + b"Transfer-Encoding: Chunked\r\n\r\n"
        raw += b"".join(chunked(piece, b";x=1") for piece in pieces) + b"0\r\n\r\n"
    else:
        raw = OK + body
    edges = sorted({0, len(raw), *(cut % len(raw) for cut in cuts)})
    reads = [(float(i), raw[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False))]
    answer = stream.parse(reads)
    assert (answer.error, answer.text, answer.chunk_tokens) == (None, "中文a", [1, 2, 1])
    assert answer.arrival_times_s == sorted(answer.arrival_times_s)
    assert answer.finished_s <= reads[-1][0]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("framed", [False, True])
def test_an_event_arrives_with_the_blank_line_that_completes_it(line_end, framed):
    first = text("a", **usage(1)).replace(b"\n", line_end)
    head, tail = first[: -len(line_end)], first[-len(line_end) :]
    last = text("b", "length", **usage(2)).replace(b"\n", line_end)
    writes = [(10, head), (20, tail), (30, last)]
    http = OK
    if framed:
        http = OK[:-2] + b"transfer-encoding: chunked\r\n\r\n"
        writes = [(at_ms, chunked(content)) for at_ms, content in writes] + [(31, b"0\r\n\r\n")]
    assert parse(*writes, head=http).arrival_times_s == [0.02, 0.03]


def test_several_events_in_one_read_arrive_together():
    answer = parse((10, text("a", **usage(1)) + text("b", **usage(2))), (20, text("c", "length", **usage(3))))
    assert answer.arrival_times_s == [0.01, 0.01, 0.02] and answer.chunk_tokens == [1, 1, 1]


@pytest.mark.parametrize(
    "dialect",
    [
        lambda body: b"\xef\xbb\xbf" + body,
        lambda body: body.replace(b"data: ", b"data:"),
        lambda body: body.replace(b"data: ", b"id: 7\nretry: 10\nevent: message\ndata: "),
        lambda body: body.replace(b"data: ", b"data\ndata: "),
        lambda body: body.replace(b'{"choices"', b'{\ndata: "choices"'),
        lambda body: body.replace(b"\n\n", b"\n\n\n\n"),
        lambda body: body.replace(b"data: ", b": note\ndata: "),
        lambda body: body[:-1],
        lambda body: body[:-2],
        lambda body: body.replace(b"[DONE]", b"[DONE] "),
    ],
)
def test_br03_dialects_of_the_standard_read_the_same(dialect):
    answer = parse((10, dialect(text("a", **usage(1)) + text("b", "length", **usage(2)) + DONE)))
    assert (answer.error, answer.text, answer.output_tokens, answer.done) == (None, "ab", 2, True)


def test_br04_usage_null_on_every_other_event():
    writes = [(10 * i, text("a", "length" if i == 7 else None, usage=None)) for i in range(1, 8)]
    answer = parse(*writes, *closing(7, 400, choices=[]))
    assert (answer.output_tokens, len(answer.arrival_times_s), answer.finished_s) == (7, 7, 0.07)
    assert answer.chunk_tokens == [None] * 7


def test_br06_counts_are_kept_where_some_text_comes_with_no_new_token():
    writes = [(10, text("a", **usage(2))), (20, text("b", **usage(2))), (30, text("c", "length", **usage(5)))]
    answer = parse(*writes)
    assert (answer.arrival_times_s, answer.chunk_tokens, answer.output_tokens) == ([0.01, 0.03], [2, 3], 5)


def test_a_token_without_text_arrives_when_its_count_does():
    answer = parse((10, text("", **usage(1))), (20, text("é", "length", **usage(2))), (21, DONE))
    assert (answer.arrival_times_s, answer.chunk_tokens) == ([0.01, 0.02], [1, 1])


def test_br17_an_event_of_any_length_is_read_whole_and_in_time():
    started_s = time.perf_counter()
    line = text("a" * 5_000_000, **usage(1))
    pieces = [(10 + i / 1000, line[i : i + 4096]) for i in range(0, len(line), 4096)]
    answer = parse(*pieces, (9000, text("b", "length", **usage(2))), (9001, DONE))
    assert (answer.error, len(answer.text), answer.output_tokens) == (None, 5_000_001, 2)
    assert time.perf_counter() - started_s < 5


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "reasoning_only"])
def test_br18_thoughts_are_tokens_under_either_name_and_alone(name):
    case = CASES[name]
    answer = parse(*case.writes)
    assert (answer.error, answer.output_tokens, len(answer.arrival_times_s)) == (None, 25, 25)
    assert answer.arrival_times_s[0] == pytest.approx(0.05)  # the first thought, not the role before it


@pytest.mark.parametrize("running", [usage(0), {"usage": {}}, {"usage": {"completion_tokens": None}}])
def test_a_running_usage_that_does_not_count_is_not_believed(running):
    writes = [(10, text("a", **running)), (20, text("b", "length", **running)), *closing(2, 30, choices=[])]
    answer = parse(*writes)
    assert (answer.arrival_times_s, answer.chunk_tokens) == ([0.01, 0.02], [None] * 2)
    assert answer.output_tokens == 2


def test_a_total_of_zero_beside_text_is_an_estimate_and_beside_silence_the_truth():
    answer = parse((10, text("a")), (20, text("b", "length")), *closing(0, 30, choices=[]))
    assert (answer.output_tokens, answer.token_count_source) == (2, "estimated")
    silent = parse((10, text("", "stop")), *closing(0, 30, choices=[]))
    assert (silent.output_tokens, silent.token_count_source) == (0, "usage")


def test_the_prompt_is_counted_though_only_the_first_usage_tells_it():
    later = {"usage": {"completion_tokens": 2}}
    assert parse((10, text("a", **usage(1))), (20, text("b", "length", **later))).prompt_tokens == 8


@pytest.mark.parametrize(("sent", "why"), [(b"", "before an answer"), (b"HTTP/1.1 200 OK\r\n", "within the headers")])
def test_a_connection_that_closes_early_says_how_far_it_came(sent, why):
    answer = stream.parse([(0.0, sent)])
    assert (answer.error, why in answer.detail) == ("connection", True)


@pytest.mark.parametrize("name", ["content", "reasoning", "reasoning_content", "refusal", "function_call"])
def test_a_token_is_one_under_whatever_name_it_comes(name):
    answer = parse((10, delta(role="assistant")), (20, delta(**{name: "a"})), (30, delta("stop")), (31, DONE))
    assert answer.arrival_times_s == [0.02]


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled"])
def test_an_answer_that_the_server_gave_up_is_no_success(reason):
    answer = parse((10, text("a")), (20, text("b", reason)), (21, DONE))
    assert (answer.error, answer.detail) == ("server_error", f"it gave up: {reason}")


@pytest.mark.parametrize(
    "event, arrivals",
    [(text("a", "stop", **usage(1)), [0.01]), (text("", "length", **usage(1)), [0.01]),
     (text("", "stop", **usage(1)), [])],
)  # fmt: skip
def test_a_single_token_is_seen_unless_it_is_the_end_marker(event, arrivals):
    answer = parse((10, event), (20, DONE))
    assert (answer.error, answer.arrival_times_s, answer.finished_s) == (None, arrivals, 0.01)


@pytest.mark.parametrize("first, second", [(usage(3), usage(1)), (usage(1), {})])
def test_running_counts_that_fall_or_leave_out_a_token_are_not_believed(first, second):
    writes = [(10, text("a", **first)), (20, text("b", **second)), (30, text("c", "length", **usage(4)))]
    answer = parse(*writes, (31, DONE))
    assert (answer.chunk_tokens, answer.output_tokens) == ([None] * 3, 4)


def test_role_only_and_empty_deltas_are_no_token_and_tool_calls_are():
    call = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    answer = parse(
        (10, delta(role="assistant", content="")),
        (20, delta()),
        (30, delta(content=None)),
        (40, delta(**call)),
        (50, delta("tool_calls")),
        *closing(1, 60, choices=[]),
    )
    assert (answer.arrival_times_s, answer.output_tokens, answer.finish_reason) == ([0.04], 1, "tool_calls")


def test_br12_without_usage_and_without_text_nothing_is_made_up():
    answer = parse((10, text("", "stop")), (11, DONE))
    assert (answer.error, answer.output_tokens, answer.token_count_source) == (None, None, "estimated")


STRANGE = [[1], "text", 3, {"choices": "x"}, {"choices": 3}, {"choices": [None]}, {"choices": [{"delta": 4}]}]


@pytest.mark.parametrize("payload", [*STRANGE, {"usage": 5}, {"usage": {"completion_tokens": "x"}}])
def test_strange_payloads_end_as_answers_not_as_exceptions(payload):
    assert parse((10, data(payload))).error in ("truncated", "server_error")


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"choices": [{"text": "a", "finish_reason": {"x": NaN}}], "usage": {"prompt_tokens": NaN}}',
        b'{"choices": [{"text": "a", "finish_reason": "\\ud800"}]}',
        b'{"error": {"message": "\\udfff"}}',
        b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": -3, "prompt_tokens": true}}',
    ],
)
def test_what_no_record_could_hold_reaches_none(content):
    answer = vars(parse((10, b"data: " + content + b"\n\n")))
    assert json.dumps(answer | {"text": ""}, allow_nan=False, ensure_ascii=False).encode()


def test_what_only_a_lenient_reader_takes_for_json_loses_no_token():
    odd = b'data: {"choices": [{"text": "\\ud800", "logprob": %s}]}\n\n'
    answer = parse((10, odd % b"-Infinity"), (20, odd % b"1e999"), (30, text("b", "length")))
    assert (answer.error, answer.arrival_times_s) == (None, [0.01, 0.02, 0.03])


@pytest.mark.parametrize("size", [b"-6", b"-4", b"+5", b"0x5", b"5_0", b"five", b""])
def test_a_chunk_of_no_size_ends_the_reading(size):
    head = OK[:-2] + b"transfer-encoding: chunked\r\n\r\n"
    assert parse((10, size + b"\r\n\r\n0\r\n\r\n"), head=head).error == "truncated"


WHOLE = {
    "length": b"HTTP/1.1 429 X\r\nContent-Length: 2\r\n\r\n{}",
    "no content": b"HTTP/1.1 204 X\r\n\r\n",
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 302 X\r\ncontent-length: 0\r\n\r\n",
    "chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\na\r\n\r\n\r\n0\r\n\r\n",
    "trailers": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n000;x\r\na: b\r\nc: d\r\n\r\n",
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("step", [1, 3, 10, 1000])
def test_the_end_is_seen_with_the_last_byte_and_not_before(name, step):
    """A server that keeps the connection open would otherwise hold each request until its time-out."""
    end, raw = stream.End(), WHOLE[name]
    seen = [end.came(raw[i : i + step]) for i in range(0, len(raw), step)]
    assert seen[-1] and not any(seen[:-1])


def test_an_answer_without_framing_ends_with_its_connection():
    end = stream.End()
    assert not any(map(end.came, (b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", text("a"), DONE)))


@pytest.mark.parametrize("raw", [b"", b"HTT", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: y\r\n"])
def test_what_is_no_answer_is_a_failed_connection(raw):
    assert stream.parse([(0.0, raw)]).error == "connection"
    assert stream.parse([]).error == "connection"


def test_interim_answers_precede_the_real_one():
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK
    assert parse((10, text("a", "length", **usage(1))), head=head).error is None


def test_a_compressed_answer_is_refused_by_name():
    head = OK[:-2] + b"content-encoding: gzip\r\n\r\n"
    assert parse((10, b"\x1f\x8b"), head=head).error == "malformed"


def test_br09_a_cut_within_an_event_is_truncated():
    answer = parse((10, text("a", **usage(1))), (20, text("b", "length")[:-9]))
    assert (answer.error, answer.arrival_times_s) == ("truncated", [0.01])


def test_a_broken_event_in_a_finished_stream_is_malformed():
    answer = parse((10, b"data: {nonsense\n\n"), (20, text("b", "length")), (30, DONE))
    assert (answer.error, answer.detail) == ("malformed", "{nonsense")


def test_error_words_are_kept():
    answer = parse((10, data({"error": {"message": "engine is dead"}})))
    assert (answer.error, answer.detail) == ("server_error", "engine is dead")
    assert json.loads(CASES["http_503"].writes[0][1])["error"]["message"] in stream.parse(
        [(0.0, b"HTTP/1.1 503 x\r\ncontent-length: 36\r\n\r\n"), (0.1, CASES["http_503"].writes[0][1])]
    ).detail


def test_two_events_that_share_one_count_are_told_from_a_count_per_event():
    both = parse((10, text("a", **usage(2))), (20, text("b", "length", **usage(2))), (21, DONE))
    assert (both.arrival_times_s, both.chunk_tokens) == ([0.01], [2])  # two tokens, and text that came later
    each = parse((10, text("a", **usage(1))), (20, text("b", "length", **usage(1))), (21, DONE))
    assert each.arrival_times_s == [0.01, 0.02]


def test_a_last_event_without_its_blank_line_arrives_with_its_last_byte():
    event = text("b", "length", **usage(2)).rstrip(b"\n")
    answer = parse((10, text("a", **usage(1))), (20, event[:-1]), (30, event[-1:]))
    assert (answer.arrival_times_s, answer.error) == ([0.01, 0.03], None)


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 500 Error\r\n\r\nno"])
def test_an_answer_that_never_streamed_has_seen_no_end_marker(raw):
    assert stream.parse([(0.0, raw)]).done is False
