"""Clients that others wrote: OpenAI's for JavaScript, LangChain's ChatOpenAI, curl (the Python ones
are in their APIs' tests).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from martlet.toy import spell
from tests.server.serving import Served, serving

CLIENTS = Path(__file__).parents[1] / "clients"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell("Hello there")) as server:
        yield server
        server.check_idle()


def test_openai_for_javascript(served: Served) -> None:
    node = shutil.which("node")
    if node is None or not (CLIENTS / "node_modules" / "openai").is_dir():
        pytest.skip("OpenAI's JavaScript client is not here: npm install in tests/clients")
    command = [node, str(CLIENTS / "openai_client.mjs"), served.base]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "whole": "Hello there",
        "usage": 12,
        "streamed": "Hello there",
        "finish": "stop",
        "streamUsage": 12,
        "helper": "Hello there",
        "response": "Hello there",
        "models": ["scripted"],
        "embedding": 2,
        "error": ["NotFoundError", 404, "model_not_found", "model"],
    }


def test_langchain(served: Served) -> None:
    """Whole, streamed with its usage, and with a tool that the template does not write, which is
    refused.
    """
    langchain = pytest.importorskip("langchain_openai")
    model: Any = langchain.ChatOpenAI(base_url=f"{served.base}/v1", api_key="none", model="scripted", max_retries=0)
    assert model.invoke("hi").content == "Hello there"
    chunks = list(model.stream("hi", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == "Hello there"
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 12
    assert [reply.content for reply in model.batch(["a", "b", "c"])] == ["Hello there"] * 3
    with pytest.raises(Exception, match="chat template does not use tools"):
        model.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]).invoke(
            "x"
        )


def test_curl(served: Served) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not here")
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
    headers = ["-H", "Content-Type: application/json"]
    command = [curl, "-sSN", f"{served.base}/v1/chat/completions", *headers, "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = [line for line in done.stdout.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(part.get("content", "") for part in parts) == "Hello there"
