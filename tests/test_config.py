"""Settings: who wins, where a value came from, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from martlet.config import EngineConfig, Origin, cache_dir, resolve_config
from martlet.errors import RequestError
from martlet.machine import MachineLimits

MACHINE = MachineLimits(8, 4, 2.9, "cgroup v2 cpu.max", 1 << 30, "MemAvailable")


def resolve(environ: dict[str, str] | None = None, **options: Any) -> EngineConfig:
    return resolve_config({"model": "m.gguf", **options}, environ or {}, MACHINE)


def test_defaults_and_their_origins() -> None:
    config = resolve()
    assert (config.backend, config.kv_dtype, config.page_size, config.max_step_tokens) == ("cpu", "f16", 32, 512)
    origins = {setting.name: setting.origin for setting in config.settings()}
    assert origins["model"] is Origin.OPTION
    assert origins["backend"] is Origin.DEFAULT
    assert origins["threads"] is Origin.MACHINE


def test_threads_of_the_machine_name_their_rule() -> None:
    config = resolve()
    setting = next(setting for setting in config.settings() if setting.name == "threads")
    assert (setting.value, setting.note) == (2, "a quota of 2.9 CPUs (cgroup v2 cpu.max)")


def test_option_wins_over_environment_over_machine() -> None:
    environ = {"MARTLET_THREADS": "3", "MARTLET_OFFLINE": "1"}
    assert resolve(environ).threads == 3
    assert resolve(environ).origins["threads"] == (Origin.ENVIRONMENT, "MARTLET_THREADS")
    assert resolve(environ, threads=5).threads == 5
    assert resolve(environ).offline is True
    assert resolve(environ, offline=False).offline is False


def test_none_means_not_given() -> None:
    assert resolve(threads=None, max_context=None).threads == 2


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"no option 'max_contxt'\. Did you mean 'max_context'\?") as caught:
        resolve(max_contxt=5)
    assert caught.value.param == "max_contxt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", 2.5),
        ("threads", True),
        ("max_context", 0),
        ("max_context", "4096"),
        ("kv_memory", -1),
        ("page_size", 0),
        ("kv_disk", ""),
        ("kv_disk", 3),
        ("kv_disk_size", 4096),  # without a folder
        ("max_step_tokens", 0),
        ("seed", 1 << 64),
        ("backend", "cuda"),
        ("kv_dtype", "q3"),
        ("kv_dtype", ""),
        ("kv_dtype", 8),
        ("kv_dtype", "q4,q8"),
        ("kv_dtype", "q4,q8:x"),
        ("offline", "yes"),
        ("model", ""),
        ("model", 7),
    ],
)
def test_values_out_of_range_name_the_option(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(**{name: value})
    assert caught.value.param == name


def test_step_smaller_than_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(RequestError, match="max_step_tokens is 4, fewer than max_seqs, 16"):
        resolve(max_step_tokens=4)


@pytest.mark.parametrize("environ", [{"MARTLET_THREADS": "many"}, {"MARTLET_OFFLINE": "maybe"}])
def test_environment_is_checked(environ: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=next(iter(environ))):
        resolve(environ)


def test_the_folder_of_kv_pages() -> None:
    assert resolve().kv_disk is None
    assert resolve({"MARTLET_KV_DISK": "/kv"}).kv_disk == "/kv"
    assert resolve({"MARTLET_KV_DISK": "/kv"}).origins["kv_disk"] == (Origin.ENVIRONMENT, "MARTLET_KV_DISK")
    config = resolve({"MARTLET_KV_DISK": "/kv"}, kv_disk=Path("/mine"), kv_disk_size=1 << 20)
    assert (config.kv_disk, config.kv_disk_size) == ("/mine", 1 << 20)
    assert resolve(kv_disk="/mine").kv_disk_size == 4 << 30
    with pytest.raises(RequestError, match="expected a whole number"):
        resolve(kv_disk="/mine", kv_disk_size=0)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().threads = 9  # type: ignore[misc]


def test_the_oracle_takes_smaller_steps() -> None:
    assert resolve(oracle=True).max_step_tokens == 64
    assert resolve(oracle=True, max_step_tokens=100).max_step_tokens == 100


def test_a_decided_value_has_its_origin() -> None:
    config = resolve().with_value("max_context", 2048, Origin.MODEL_FILE, "trained for it")
    assert config.max_context == 2048
    assert config.origins["max_context"] == (Origin.MODEL_FILE, "trained for it")


def test_cache_dir() -> None:
    assert cache_dir({"MARTLET_HOME": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/martlet")
    assert cache_dir({}) == Path("~/.cache/martlet").expanduser()
