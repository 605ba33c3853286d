"""Where the tests find real models, and which tests are fast.

MARTLET_TEST_MODELS is the folder (default: where `martlet pull` puts them). A test whose model is
missing is skipped with the reason; with MARTLET_REQUIRE_MODEL=1, as in `make test`, a missing
default model is a failure.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no failure: how long an example takes says nothing about whether it is right.
settings.register_profile("martlet", deadline=None)
settings.load_profile("martlet")

# `pytest -m fast` runs these in a minute or two: no model but toys, no server, no large load.
FAST = (
    "cache/",
    "engine/test_plan.py",
    "observe/",
    "runtime/",
    "sched/",
    "server/test_tool_calls.py",
    "speculate/",
    "test_config.py",
    "test_docstrings.py",
    "test_kv_types.py",
    "test_layering.py",
    "test_machine.py",
    "test_offline.py",
    "test_options.py",
    "test_saved_measurements.py",
    "test_spine.py",
    "test_toy.py",
)

MODELS = {
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b.gguf",
    "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b.gguf",
}


def is_fast(path: Path) -> bool:
    """Whether a test file is in FAST."""
    return path.relative_to(Path(__file__).parent).as_posix().startswith(FAST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m fast` need not import the other files."""
    if config.option.markexpr == "fast" and collection_path.suffix == ".py" and not is_fast(collection_path):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_fast(item.path):
            item.add_marker("fast")


def model_folder() -> Path:
    """The folder with the models' files."""
    return Path(os.environ.get("MARTLET_TEST_MODELS") or "~/.cache/martlet/models").expanduser()


def model_path(name: str) -> Path:
    """The file of a model, or a skipped test."""
    path = model_folder() / MODELS[name]
    if not path.exists():
        reason = f"{path} is not there: fetch it with `martlet pull {name}`, or set MARTLET_TEST_MODELS"
        if name == "smollm2-135m" and os.environ.get("MARTLET_REQUIRE_MODEL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: the default model."""
    return model_path("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma-3-270M, Q4_K_M."""
    return model_path("gemma3-270m")


@pytest.fixture(scope="session")
def qwen_small_path() -> Path:
    """Qwen2.5-Coder-0.5B."""
    return model_path("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """Qwen2.5-Coder-1.5B, Q4_K_M."""
    return model_path("qwen2.5-coder-1.5b")
