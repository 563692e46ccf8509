"""The card under the article: right on strange hardware, and with nothing personal in it."""

import getpass
import json
import socket
import sys

import fake_nvml
import pytest

from kvlab import paths
from kvlab.measure import provenance, telemetry


@pytest.fixture
def card(monkeypatch):
    def card(visible=None, **readings):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.make(**readings))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return telemetry.card()

    return card


def test_br19_an_unsupported_reading_is_absent_and_the_others_stay(card):
    found = card(nvmlDeviceGetEnforcedPowerLimit=fake_nvml.NOT_SUPPORTED)
    assert found["power_limit_w"] is None and found["memory_bytes"] == 24 * 2**30
    assert card()["power_limit_w"] == 150


def test_br19_another_error_is_not_swallowed(card):
    with pytest.raises(RuntimeError):
        card(nvmlDeviceGetEnforcedPowerLimit=RuntimeError("lost"))


def test_br19_no_library_is_no_card(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert telemetry.card() is None


NO_TEXT = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")


@pytest.mark.parametrize(
    "name, shown", [("NVIDIA A10", "NVIDIA A10"), (b"NVIDIA A10", "NVIDIA A10"), (NO_TEXT, "unknown")]
)
def test_br22_the_name_is_text_whatever_the_binding_hands_out(card, name, shown):
    assert json.loads(json.dumps(card(nvmlDeviceGetName=name)))["model"] == shown


def test_a_hidden_card_is_no_card(card):
    assert card(visible="") is None and card(visible="-1") is None
    assert card(visible="GPU-0") is not None and card(visible="1") is not None


def test_the_environment_names_no_person_host_or_path():
    text = json.dumps(provenance.environment())
    user = getpass.getuser()
    for private in (socket.gethostname(), str(paths.ROOT), f"/{user}", f'"{user}"'):
        assert private not in text


def test_the_environment_id_follows_what_changes_a_number_and_nothing_else(monkeypatch):
    before = provenance.environment()["environment"]
    assert provenance.environment()["environment"] == before
    monkeypatch.setattr(provenance, "boot", lambda: "another boot")
    assert provenance.environment()["environment"] == before
    monkeypatch.setattr(provenance, "cpu_model", lambda: "another CPU")
    assert provenance.environment()["environment"] != before
