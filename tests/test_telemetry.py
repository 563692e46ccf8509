"""What the machine did: right on strange cards, honest where nothing can be read, and never in the way."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import fake_nvml
import numpy
import pytest
from fake_nvml import CARDS, DENIED, LOST, MIB, NOT_SUPPORTED

from kvlab.analyse import load
from kvlab.article import load_room, prose
from kvlab.measure import sampling, telemetry

POWER = "nvmlDeviceGetPowerUsage"
TEMPERATURE = "nvmlDeviceGetTemperature"
UTILISATION = "nvmlDeviceGetUtilizationRates"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses"
MEMORY = "nvmlDeviceGetMemoryInfo"


@pytest.fixture
def nvml(monkeypatch):
    """Put a stand-in in pynvml's place; `visible` is CUDA_VISIBLE_DEVICES."""

    def nvml(visible=None, **readings):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.make(**readings))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return nvml


def record(sampled, **more):
    """A record with this window's telemetry, as it comes back from the file."""
    whole = {"kind": "generation", "status": "ok", "point": {"context_length": 8}, "use_cache": True}
    return json.loads(json.dumps(whole | {"telemetry": sampled.record()} | more, allow_nan=False))


def sampled_by_hand(seconds=(), clock=None, **options):
    """A window whose samples are taken at given moments of a fake clock, without the thread."""
    now = clock or SimpleNamespace(s=0.0)
    window = sampling.Telemetry(clock=lambda: now.s, interval_s=1e9, **options)
    with window:
        for at_s in seconds:
            now.s = at_s
            window.sample()
    return window


def columns(window):
    return {name: [row[i] for row in window["samples"]] for i, name in enumerate(window["columns"])}


# ---- readings that are not there


@pytest.mark.parametrize("missing", [(POWER,), (TEMPERATURE,), (POWER, TEMPERATURE)])
def test_br19_an_unsupported_reading_is_a_gap_and_the_others_stay(nvml, missing):
    nvml(**dict.fromkeys(missing, NOT_SUPPORTED))
    found = sampled_by_hand([0.5, 1.5]).record()
    names = {POWER: "power_w", TEMPERATURE: "temperature_c"}
    gaps = {names[reading] for reading in missing}
    assert found["unreadable"] == dict.fromkeys(gaps, "not supported") and found["trouble"] is None
    for name in ("power_w", "temperature_c", "utilisation", "sm_clock_hz"):
        assert (set(columns(found)[name]) == {None}) == (name in gaps), name


def test_br19_a_denied_reading_is_told_from_an_unsupported_one(nvml):
    nvml(**{POWER: DENIED})
    assert sampled_by_hand().record()["unreadable"] == {"power_w": "denied"}


def test_br19_any_other_error_is_reported_and_ends_no_measurement(nvml):
    nvml(**{POWER: LOST})
    found = sampled_by_hand([1.0])
    assert "GpuIsLost" in found.record()["trouble"]
    assert load.windows([record(found)])["trouble"].iloc[0].startswith("NVMLError_GpuIsLost")


@pytest.mark.parametrize("module, word", [(None, "nvidia-ml-py"), (fake_nvml.make(init=DENIED), "does not start")])
def test_br19_without_a_library_or_a_driver_there_is_one_notice_and_the_cpu_is_sampled(monkeypatch, module, word):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = sampled_by_hand([1.0]).record()
    assert word in found["no_card"] and found["trouble"] is None
    assert "power_w" not in found["columns"] and "own_cpu_s" in found["columns"]


def test_br22_a_name_in_bytes_is_text_in_the_record(nvml, monkeypatch):
    nvml(nvmlDeviceGetName=b"NVIDIA A10")
    assert json.loads(json.dumps(telemetry.card()))["model"] == "NVIDIA A10"
    monkeypatch.setattr(fake_nvml, "CARDS", (b"GPU-0aaaaaaa-0000",))
    assert record(sampled_by_hand())["telemetry"]["card_uuid"] == "GPU-0aaaaaaa-0000"


# ---- whose memory


def test_br23_four_quantities_of_memory_under_four_names_with_their_baseline(nvml):
    now = SimpleNamespace(s=0.0)
    processes = [fake_nvml.process(os.getpid(), 1900), fake_nvml.process(1, 2000)]
    used = {MEMORY: lambda: fake_nvml.memory(5000 if 1 <= now.s < 2 else 3000), PROCESSES: processes}
    nvml(**used)
    window = sampled_by_hand([0.5, 1.5, 2.5], now)
    (row,) = load.windows([record(window, peak_memory_bytes=1500 * MIB, reserved_memory_bytes=1800 * MIB)]).to_dict(
        "records"
    )
    mebibytes = {name: row[name] / MIB for name in load_room.MEMORY}
    assert mebibytes == {
        "card_memory_before_bytes": 3000, "card_memory_bytes": 5000, "card_memory_rise_bytes": 2000,
        "own_memory_bytes": 1900, "allocated_bytes": 1500, "reserved_bytes": 1800,
    }  # fmt: skip
    assert row["marks"] == ("foreign",)


@pytest.mark.parametrize("processes", [[], [fake_nvml.process(999_999, 4000)], NOT_SUPPORTED, DENIED])
def test_hidden_process_ids_leave_our_share_unknown_and_accuse_nobody(nvml, processes):
    nvml(**{PROCESSES: processes})
    (row,) = load.windows([record(sampled_by_hand([1.0]))]).to_dict("records")
    assert row["own_memory_bytes"] is None and row["marks"] == ()
    assert row["card_memory_bytes"] == 3000 * MIB


def test_under_wsl_a_process_has_no_size(nvml):
    nvml(**{PROCESSES: [fake_nvml.process(os.getpid(), None)]})
    found = columns(sampled_by_hand().record())
    assert set(found["own_memory_bytes"]) == {None} and set(found["other_processes"]) == {0}


def test_memory_that_the_driver_keeps_is_not_counted_where_nvml_tells_it_apart(nvml, monkeypatch):
    nvml()
    ask = lambda _, version=1: fake_nvml.memory(2700 if version == 2 else 3000)  # noqa: E731
    for name, value in {"nvmlMemory_v2": 2, MEMORY: ask}.items():
        monkeypatch.setattr(sys.modules["pynvml"], name, value, raising=False)
    assert columns(sampled_by_hand().record())["card_memory_bytes"][0] == 2700 * MIB


# ---- which card


@pytest.mark.parametrize(
    "visible, index",
    [(None, 0), ("0", 0), ("1,0", 1), (CARDS[1], 1), ("GPU-1bbb", 1), ("", None), ("-1", None), ("7", None),
     ("GPU-9", None), ("no-such", None)],
)  # fmt: skip
def test_the_card_is_the_one_that_cuda_sees(nvml, visible, index):
    nvml(visible)
    found = telemetry.card()
    assert (found and found["uuid"]) == (None if index is None else CARDS[index])


def test_the_uuid_that_cuda_works_on_wins_over_any_index(nvml):
    nvml("0")
    assert sampled_by_hand(card_uuid=CARDS[1]).record()["card_uuid"] == CARDS[1]


def test_a_mig_instance_is_found_and_what_it_cannot_tell_is_absent(nvml):
    nvml("MIG-7c", mig=["MIG-7c"], **{UTILISATION: NOT_SUPPORTED, POWER: NOT_SUPPORTED})
    found = sampled_by_hand(card_uuid=CARDS[0]).record()
    assert found["card_uuid"] == "MIG-7c" and set(found["unreadable"]) == {"utilisation", "power_w"}
    nvml("MIG-GPU-0aaaaaaa/1/0")
    assert telemetry.card() is None


# ---- load over time


def test_br24_a_load_that_is_on_every_other_second_is_half_a_load(nvml):
    now = SimpleNamespace(s=0.0)
    nvml(**{UTILISATION: lambda: SimpleNamespace(gpu=100 if int(now.s) % 2 == 0 else 0)})
    window = sampled_by_hand([0.1 * step for step in range(1, 201)], now)
    (row,) = load.windows([record(window) | {"telemetry": window.record() | {"interval_s": 0.1}}]).to_dict("records")
    assert row["utilisation"] == pytest.approx(0.5, abs=0.05)
    assert (row["samples"], row["interval_s"]) == (202, 0.1)


def test_br24_a_window_below_the_drivers_own_has_samples_and_no_utilisation(nvml):
    nvml()
    (row,) = load.windows([record(sampled_by_hand([0.05]))]).to_dict("records")
    assert row["samples"] >= 1 and row["utilisation"] is None and row["power_w"] == 120


def test_a_long_window_keeps_a_bounded_number_of_samples_and_says_its_interval(nvml):
    nvml()
    found = sampled_by_hand(range(1, 300)).record()
    assert len(found["samples"]) <= sampling.MOST_SAMPLES + 1
    assert found["interval_s"] == 2e9


def test_energy_is_a_counters_rise_and_is_given_per_token(nvml):
    now = SimpleNamespace(s=0.0)
    nvml(nvmlDeviceGetTotalEnergyConsumption=lambda: 5_000_000 + 100_000 * now.s)
    window = sampled_by_hand([1.0, 2.0], now)
    (row,) = load.windows([record(window, chunk_tokens=[1] * 40)]).to_dict("records")
    assert row["energy_per_token_j"] == 5


@pytest.mark.parametrize("bits, marks", [(0x1, ()), (0x4, ("power_cap",)), (0x48, ("hardware", "thermal"))])
def test_a_slowed_card_marks_its_window_and_an_idle_one_does_not(nvml, bits, marks):
    nvml(nvmlDeviceGetCurrentClocksEventReasons=bits)
    assert load.windows([record(sampled_by_hand([1.0]))])["marks"].iloc[0] == marks


def test_an_older_binding_names_the_reasons_otherwise(nvml, monkeypatch):
    nvml(nvmlDeviceGetCurrentClocksThrottleReasons=0x20)
    monkeypatch.delattr(sys.modules["pynvml"], "nvmlDeviceGetCurrentClocksEventReasons")
    assert load.windows([record(sampled_by_hand([1.0]))])["marks"].iloc[0] == ("thermal",)


# ---- the CPU


def processor(own, busy, steal, cpus=2):
    """A window of ten seconds on `cpus` CPUs with these CPU seconds in it."""
    rows = [[0.0, 100.0, 10, 1000.0, 50.0], [10.0, 100.0 + own, 10, 1000.0 + busy, 50.0 + steal]]
    names = ["t_s", "own_cpu_s", "resident_set_bytes", "busy_cpu_s", "steal_cpu_s"]
    return {"window_s": 10.0, "interval_s": 0.1, "processes": 1, "cpus": cpus, "cpu_frequencies_hz": [2e9, None],
            "trouble": None, "columns": names, "samples": rows}  # fmt: skip


def test_load_by_others_and_stolen_time_are_told_apart_and_marked():
    window = {"kind": "point", "status": "ok", "point": {"concurrency": 1, "context_length": 8}}
    quiet, shared = (window | {"telemetry": processor(15.0, *rest)} for rest in ((15.5, 0.0), (19.0, 1.0)))
    first, second = load.windows([quiet, shared]).to_dict("records")
    assert (first["own_share"], first["others_share"], first["steal_share"]) == pytest.approx((0.75, 0.025, 0.0))
    assert first["marks"] == () and second["marks"] == ("others", "steal")
    assert first["cpu_frequency_hz"] == 2e9 and first["utilisation"] is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_real_window_counts_our_own_work_and_that_of_a_named_process():
    with sampling.Telemetry(os.getppid(), interval_s=0.02) as window:
        sum(i * i for i in range(2_000_000))
    found = columns(window.record())
    assert window.record()["processes"] >= 2
    assert found["own_cpu_s"][-1] > found["own_cpu_s"][0]
    assert found["busy_cpu_s"][-1] >= found["busy_cpu_s"][0] and min(found["resident_set_bytes"]) > 2**20
    assert found["t_s"][0] <= 0 and found["t_s"][-1] >= window.record()["window_s"] - 1e-4


def test_no_thread_and_no_file_is_left_when_the_window_ends():
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), sampling.Telemetry() as window:
        raise KeyboardInterrupt
    assert not window._thread.is_alive() and len(os.listdir("/proc/self/fd")) == files


def test_a_process_that_ends_in_the_window_is_no_failure():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    time.sleep(0.05)
    with sampling.Telemetry(child.pid) as window:
        child.communicate(b"\n")
    assert window.record()["trouble"] is None


# ---- around the measurements


def test_an_arm_keeps_the_samples_of_its_own_window():
    from kvlab import models, weights
    from kvlab.measure import decoding

    model = weights.load(models.resolve("random:llama"), "float32")
    point = {"dtype": "float32", "context_length": 8, "output_tokens": 4}
    for arm in decoding.measure_pair(model, point, numpy.random.default_rng(0)):
        times_s = [row[0] for row in arm["telemetry"]["samples"]]
        assert times_s[0] <= 0 and arm["arrival_times_s"][-1] <= arm["telemetry"]["window_s"] <= times_s[-1] + 1e-4
        assert load.windows([arm])["context_length"].tolist() == [8]


def test_a_served_point_keeps_the_samples_of_its_measured_requests_and_a_strangers_server_has_none(tmp_path):
    from test_client import QUICK, replaying

    with replaying(tmp_path, QUICK) as replay:
        _, ours = replay.measure(1, 1, server_pid=replay.process.pid)
        _, theirs = replay.measure(1, 1)
    window = ours["telemetry"]
    assert window["processes"] >= 2 and window["window_s"] >= ours["duration_s"] and window["trouble"] is None
    assert load.windows([ours])["concurrency"].tolist() == [1]
    assert theirs["telemetry"] is None and load.windows([theirs]).empty


# ---- in the article


@pytest.fixture
def shown(monkeypatch):
    """Everything that the section of these records displays, in both languages, as one text."""
    outputs = []
    monkeypatch.setattr(prose, "display", lambda data, raw, metadata: outputs.append(data))

    def shown(records):
        outputs.clear()
        load_room.machine_load(records, "both", "results/x/s1b.jsonl")
        return " ".join(part for output in outputs for part in output.values())

    return shown


def test_records_from_before_there_was_telemetry_say_so_and_break_nothing(shown):
    old = {"kind": "generation", "status": "ok", "point": {"context_length": 8}, "use_cache": True}
    assert "no samples of the machine" in shown([old])


def test_a_page_tells_of_how_many_measured_windows_it_has_samples(shown):
    window = {"kind": "point", "status": "ok", "point": {"concurrency": 1, "context_length": 8}}
    sampled = window | {"telemetry": processor(15.0, 15.1, 0.0)}
    others = [{"kind": "request", "status": "ok", "point": window["point"]}, window | {"status": "failed"}]
    whole, partly = (shown([sampled, *rest, *others]).replace("\xa0", " ") for rest in ([], [window, window]))
    assert "1 of 1 measured windows were sampled" in whole and "is not known" not in whole
    assert "1 of 3 measured windows were sampled" in partly and "The other 2 were measured without samples" in partly
    assert "None of the 1 sampled windows" in partly and "另外 2 个窗口" in partly


def test_br41_without_a_card_the_section_says_that_nothing_of_it_can_be_measured(shown):
    window = {"kind": "point", "status": "ok", "point": {"concurrency": 1, "context_length": 8}}
    text = shown([window | {"telemetry": processor(15.0, 19.0, 0.0)}])
    assert "No GPU was sampled" in text and "1 of 1 sampled windows are marked" in text.replace("\xa0", " ")
    assert "本实验" in text and "NaN" not in text and "nan" not in text


def test_a_disturbed_window_is_marked_in_frames_and_charts():
    import fake_frames

    from kvlab.analyse import summary
    from kvlab.article import charts

    frame = fake_frames.generations().assign(disturbed=False)
    plain = charts.tpot_by_context(frame, "en")
    frame.loc[frame.index[:2], "disturbed"] = True
    squares = charts.tpot_by_context(frame, "en")
    assert sum(len(ax.collections) for ax in squares.axes) > sum(len(ax.collections) for ax in plain.axes)
    arm = {"kind": "generation", "status": "ok", "pair": "p", "use_cache": True, "environment": "e", "repetition": 1,
           "arrival_times_s": [1.0, 2.0], "chunk_tokens": [1, 1], "point": {"context_length": 8}}  # fmt: skip
    records = [arm, arm | {"telemetry": processor(15.0, 15.1, 0.0)}, arm | {"telemetry": processor(15.0, 19.0, 0.0)}]
    assert summary.generations(records)["disturbed"].tolist() == [False, False, True]


def test_a_card_without_power_readings_shows_not_measurable_in_that_column(nvml, shown):
    nvml(**{POWER: NOT_SUPPORTED})
    text = shown([record(sampled_by_hand([1.0, 2.0]))])
    assert "not measurable" in text and "61" in text and "nan" not in text
