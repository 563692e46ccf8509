"""A rerun measures what is missing: not less, not more, and never across a torn pair."""

from contextlib import contextmanager

import pytest

from kvlab import params, sweep

ENVIRONMENT = {"environment": "e1", "boot": "b1"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_OUTPUT", str(tmp_path))
    return sweep.Run("smoke", ENVIRONMENT)


def smoke(**changes):
    defaults = {name: default for name, (_, default) in params.all_declared().items()}
    few = {"context_lengths": [16, 32], "repetitions": 2, "step_curve_repetitions": 0, "memory_repetitions": 0}
    few |= {"output_lengths": [12], "output_lengths_context": 16, "output_repetitions": 1}  # as the lengths do
    return sweep.SimpleNamespace(**defaults | {"profile": "smoke"} | few | changes)


class FakeWorker:
    """Stands in for the process that measures: says what it was asked for, and can be stopped in mid-pair."""

    def __init__(self, stop_after=None):
        self.asked, self.stop_after, self.opened = [], stop_after, 0

    @contextmanager
    def __call__(self, for_memory=False):
        self.opened += 1
        yield self

    def measure_memory(self, point, repetition):
        return [record | {"kind": "memory"} for record in self.measure_pair(point, repetition)]

    def measure_pair(self, point, repetition, control=False, negative_control=False):
        if negative_control:
            return
        self.asked.append((point["attention"], point["context_length"], repetition))
        pair = f"{self.opened}/{len(self.asked)}/{id(self)}"
        for use_cache in (True, False):
            if self.stop_after is not None and len(self.asked) > self.stop_after and not use_cache:
                raise KeyboardInterrupt
            yield {
                "experiment": "s1b",
                "kind": "generation",
                "point": point,
                "repetition": repetition,
                "status": "ok",
                "pair": pair,
                "control": control,
                "use_cache": use_cache,
            }


def test_every_point_is_measured_once_with_a_control_first_and_last(run):
    worker = FakeWorker()
    sweep.on_off(run, smoke(), worker)
    assert worker.opened == 2  # a process of its own for each repetition
    first = worker.asked[:6]
    assert first[0] == first[-1] == ("sdpa", 16, 1)
    assert sorted(first[1:-1]) == [("eager", 16, 1), ("eager", 32, 1), ("sdpa", 16, 1), ("sdpa", 32, 1)]


def test_a_rerun_with_nothing_missing_starts_no_process(run):
    sweep.on_off(run, smoke(), FakeWorker())
    again = FakeWorker()
    sweep.on_off(run, smoke(), again)
    assert again.opened == 0


def test_an_interrupted_run_goes_on_and_a_lone_arm_is_measured_again(run):
    stopped = FakeWorker(stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        sweep.on_off(run, smoke(repetitions=1), stopped)
    again = FakeWorker()
    sweep.on_off(run, smoke(repetitions=1), again)
    assert set(again.asked[1:-1]) == {
        ("eager", 16, 1),
        ("eager", 32, 1),
        ("sdpa", 16, 1),
        ("sdpa", 32, 1),
    } - set(stopped.asked[1:3])


def test_one_more_length_measures_that_length_alone(run):
    sweep.on_off(run, smoke(), FakeWorker())
    again = FakeWorker()
    sweep.on_off(run, smoke(context_lengths=[16, 24, 32]), again)
    assert {length for _, length, _ in again.asked} == {16, 24}  # 16 is the control


def test_remeasure_adds_repetitions_and_removes_nothing(run):
    sweep.on_off(run, smoke(), FakeWorker())
    again = FakeWorker()
    sweep.on_off(run, smoke(remeasure=True), again)
    assert {repetition for _, _, repetition in again.asked} == {3, 4}
    assert len(run.store("s1b").load()) == 2 * 2 * 12


def test_a_failure_is_measured_again_and_an_expected_shortage_of_memory_is_not(run):
    store, p = run.store("s1b"), smoke(repetitions=1)
    for point, status in zip(
        [point for point, _ in sweep.on_off_points(p)], ("failed", "out_of_memory", "ok", "ok")
    ):
        for use_cache in (True, False):
            store.append(
                {"experiment": "s1b", "kind": "generation", "point": point, "repetition": 1, "status": status}
                | {"pair": str(point), "use_cache": use_cache, "announced": True}
            )
    missing = sweep.missing(store.load(), "generation", sweep.on_off_points(p))
    assert [(point["attention"], point["context_length"]) for point, _ in missing] == [("eager", 16)]


def test_another_environment_starts_from_nothing(run):
    sweep.on_off(run, smoke(), FakeWorker())
    elsewhere = sweep.Run("smoke", ENVIRONMENT | {"environment": "e2"})
    worker = FakeWorker()
    sweep.on_off(elsewhere, smoke(), worker)
    assert worker.opened == 2


def test_the_step_curve_has_its_own_number_of_repetitions(run):
    worker = FakeWorker()
    p = smoke(step_curve_repetitions=1, step_curve_context_length=64, step_curve_output_tokens=9)
    sweep.on_off(run, p, worker)
    assert [asked for asked in worker.asked if asked[1] == 64] == [("sdpa", 64, 1)]


def test_output_lengths_share_the_pairs_that_other_charts_measure(run):
    worker = FakeWorker()
    p = smoke(output_lengths=[2, 12], output_repetitions=3, attention_kernels=["sdpa"])
    assert [(x["output_tokens"], n) for x, n in sweep.output_points(p)] == [(2, 3), (12, 3)]
    sweep.on_off(run, p, worker)
    measured = [asked for asked in worker.asked if asked[1] == 16]
    assert len(measured) == 3 * 2 + 3 * 2  # two output lengths, three times each, and a control first and last
    assert not sweep.missing(run.store("s1b").load(), "generation", sweep.output_points(p))


def test_a_second_kind_of_cache_is_measured_with_one_kernel_beside_the_first(run):
    p = smoke(caches=["dynamic", "static"])
    kinds = [(x["cache"], x["attention"]) for x, _ in sweep.on_off_points(p)]
    assert sorted(set(kinds)) == [("dynamic", "eager"), ("dynamic", "sdpa"), ("static", "sdpa")]
    assert len(kinds) == 6 and sweep.cache_kind_points(smoke()) == []


def test_memory_is_weighed_once_in_a_process_of_its_own(run):
    p = smoke(context_lengths=[8, 16, 24, 32], memory_repetitions=1, repetitions=1)
    worker = FakeWorker()
    sweep.on_off(run, p, worker)
    weighed = [r for r in run.store("s1b").load() if r["kind"] == "memory"]
    assert {(r["point"]["context_length"], r["point"]["output_tokens"]) for r in weighed} == {(32, 1), (16, 1)}
    assert worker.opened == 2
    sweep.on_off(run, p, again := FakeWorker())
    assert again.opened == 0


class Forecast:
    available_bytes = 2**30

    def peak_bytes(self, point):
        return 2**20 * point["context_length"] ** 2

    def fits(self, point):
        return self.peak_bytes(point) < self.available_bytes


class ShortOfMemory(FakeWorker):
    def measure_pair(self, point, repetition, control=False, negative_control=False):
        for record in super().measure_pair(point, repetition, control, negative_control):
            short = point["context_length"] >= 32 and not record["use_cache"]
            yield record | ({"status": "out_of_memory", "reason": "no memory left"} if short else {"reason": None})


@pytest.mark.parametrize("forecast, failure", [(Forecast(), {}), (None, {"S1B": "no memory left"})])
def test_memory_that_runs_out_is_a_result_where_it_was_announced_and_else_a_failure(
    run, tmp_path, monkeypatch, forecast, failure
):
    monkeypatch.setenv("KVLAB_PROGRESS", str(tmp_path / "progress"))
    p = smoke(repetitions=1, attention_kernels=["sdpa"])
    sweep.remember_parameters(vars(p))
    sweep.remember_environment(sweep.paths.results("smoke"), ENVIRONMENT)
    sweep.on_off(run, p, ShortOfMemory(), forecast)
    said = (tmp_path / "progress").read_text()
    assert said.count("warning: sdpa 32 tokens: about 1 GiB of memory predicted, 1 GiB there") == bool(forecast)
    left = {name: why for name, why in sweep.unmeasured("smoke").items() if name == "S1B"}
    assert left.keys() == failure.keys() and all(why in left[name] for name, why in failure.items())
    sweep.on_off(run, p, again := ShortOfMemory(), forecast)
    assert again.opened == bool(failure), "what was announced is not tried again"


class NoServer(Exception):
    pass


def test_a_server_that_does_not_start_is_a_record_and_the_report_goes_on(run):
    @contextmanager
    def open_server():
        raise NoServer("vLLM is not installed here; install it\nLast lines of its log:\n/home/somebody/vllm.py")
        yield

    p = smoke(full_cache_space_gib=0.07, compare_compiled=True)
    servers = [points_of(p) for points_of in (sweep.serving_points, sweep.cache_points, sweep.compared_points)]
    for tried, points in enumerate(servers, start=1):  # one that failed is no other's failure
        sweep.serving(run, p, points, open_server, None, NoServer)
        assert [len(run.records("s1", each)) for each in servers] == [1] * tried + [0] * (3 - tried)
        (record,) = run.records("s1", points)
        assert (record["status"], record["kind"]) == ("failed", "server")
        assert record["reason"] == "vLLM is not installed here; install it"


def test_s1_runs_exactly_s1bs_lengths_at_concurrency_one():
    points = [
        point for point, _ in sweep.serving_points(smoke(concurrencies=[1, 4], serving_context_length=32))
    ]
    assert [(x["concurrency"], x["context_length"]) for x in points] == [(1, 32), (4, 32), (1, 16)]


def test_the_plain_points_of_s1_are_what_they_were():
    """Records of earlier runs must still count as measured."""
    (point, _), *_ = sweep.serving_points(smoke(model="m", concurrencies=[2]))
    assert point == {
        "model": "m", "model_revision": None, "dtype": "float32", "device": "cpu", "threads": 1, "engine": "vllm",
        "enforce_eager": True, "prefix_caching": False, "chunked_prefill": True, "loop": "closed", "concurrency": 2,
        "context_length": 256, "output_tokens": 24, "output_jitter": 0.25, "kv_cache_space_bytes": 2**29,
    }  # fmt: skip


def test_the_small_cache_gets_the_heaviest_load_and_shared_prefixes():
    p = smoke(full_cache_space_gib=0.0625, concurrencies=[1, 4], shared_prefix_lengths=[16, 32])
    full, *reused = [point for point, _ in sweep.cache_points(p)]
    twin = next(point for point, _ in sweep.serving_points(p) if point["concurrency"] == 4)
    assert full == twin | {"kv_cache_space_bytes": 2**26, "prefix_caching": True}  # the same load, a smaller cache
    assert [point["shared_prefix_tokens"] for point in reused] == [0, 16, 32]
    assert sweep.cache_points(smoke(full_cache_space_gib=0.0)) == []
    assert sweep.cache_points(smoke(full_cache_space_gib=0.1, base_url="http://x")) == []  # it is not ours to start


def test_open_loop_points_state_their_rate():
    points = [point for point, _ in sweep.open_loop_points(smoke(open_loop_rates=[0.5, 2.0]))]
    assert [(x["loop"], x["concurrency"], x["request_rate_per_s"]) for x in points] == [
        ("open", None, 0.5), ("open", None, 2.0),
    ]  # fmt: skip


def test_points_are_measured_again_until_they_are_sure_or_the_repetitions_used_up(run):
    p, worker = smoke(interval_within=0.1, most_repetitions=4), FakeWorker()
    sweep.on_off(run, p, worker, None, lambda found, share: found[0]["point"]["context_length"] == 32)
    counted = [sum(asked[:2] == ("sdpa", n) for asked in worker.asked) for n in (16, 32)]
    assert counted[1] == 4 and {r for _, n, r in worker.asked if n == 32} == {1, 2, 3, 4}
    assert {r for kernel, n, r in worker.asked if (kernel, n) == ("eager", 16)} == {1, 2}


def test_without_a_wish_for_sureness_nothing_is_measured_again(run):
    sweep.on_off(run, smoke(), worker := FakeWorker(), None, lambda found, share: True)
    assert worker.opened == 2
