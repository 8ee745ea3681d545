"""Which variables of the environment are settings."""

from __future__ import annotations

import pytest

from photon_backend.config import idle_variables, read_settings


def test_variables_become_settings() -> None:
    settings = read_settings({"PHOTON_ROWS": "7", "PHOTON_OVERLAP": "false", "PHOTON_PORT": "tcp://10.0.0.1:80"})
    assert settings.rows == 7 and not settings.overlap


def test_a_value_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="PHOTON_ROWS='0'"):
        read_settings({"PHOTON_ROWS": "0"})


def test_a_variable_that_does_nothing_is_told() -> None:
    environ = {"PHOTON_ROW": "7", "PHOTON_DEVICE": "cuda", "PHOTON_ZZZ": "", "PHOTON_ROWS": "7", "HOME": "/"}
    assert idle_variables(environ) == [
        "PHOTON_DEVICE has no effect on the launcher, which takes DEVICE",
        "PHOTON_ROW is no setting and has no effect; is PHOTON_ROWS meant?",
        "PHOTON_ZZZ is no setting and has no effect",
    ]


def test_what_kubernetes_tells_of_a_service_named_photon_is_let_be() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    assert idle_variables({f"PHOTON_{name}": "x" for name in names}) == []
