"""Who may call: keys, rates, web pages; where: ports, sockets, TLS; and how a server starts and
ends.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from martlet.errors import RequestError
from martlet.server.settings import ServerSettings
from martlet.toy import spell
from tests.server.serving import Served, serving

CHAT = "/v1/chat/completions"
BODY = '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with serving(spell("abc"), api_keys=("first-key", "second-key"), cors_origins=("https://page.example",)) as served:
        yield served


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"X-Api-Key": "first-keyy"},
     {"Authorization": "Bearer first-ke"}, {"Authorization": "Bearer é".encode()}],
)  # fmt: skip
def test_wrong_keys_are_refused(keyed: Served, headers: dict[str, str]) -> None:
    for path in (CHAT, "/metrics", "/nothing", "/v1/models"):
        response = keyed.http.request("POST" if path == CHAT else "GET", path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "first" not in response.text


def test_right_keys_and_open_paths(keyed: Served) -> None:
    for headers in (
        {"Authorization": "Bearer first-key"},
        {"Authorization": "Bearer second-key"},
        {"X-Api-Key": "first-key"},
    ):
        assert keyed.post(CHAT, BODY, headers=headers).status_code == 200
    for path in ("/health", "/ready", "/version"):
        assert keyed.http.get(path).status_code == 200


def test_preflight_needs_no_key(keyed: Served) -> None:
    """Fault SRV-17."""
    asked = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = keyed.http.options(CHAT, headers=asked)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(response.headers["access-control-allow-headers"].split(","))
    answer = keyed.post(CHAT, BODY, headers={"Origin": asked["Origin"], "Authorization": "Bearer first-key"})
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert keyed.http.options(CHAT, headers=asked | {"Origin": "https://evil.example"}).status_code == 403


def test_pages_of_other_origins_are_refused() -> None:
    """A form or script of a web page reaches loopback without a preflight; a name that was bound to
    it is none of ours.
    """
    with serving(spell("abc")) as served:
        assert served.post(CHAT, BODY, headers={"Origin": "https://evil.example"}).status_code == 403
        assert served.post(CHAT, BODY, headers={"Host": "evil.example:8000"}).status_code == 403
        own = served.base.removeprefix("http://")
        assert served.post(CHAT, BODY, headers={"Origin": served.base, "Host": own}).status_code == 200
        for host in ("localhost:8000", "127.0.0.1", "[::1]:80", "martlet.localhost"):
            assert served.post(CHAT, BODY, headers={"Host": host}).status_code == 200
        response = served.chat()
        # off by default
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_rate() -> None:
    """Ask 32: 429 with Retry-After."""
    with serving(spell("abc"), requests_per_minute=3) as served:
        codes = [served.http.get("/v1/models").status_code for _ in range(4)]
        assert codes == [200, 200, 200, 429]
        response = served.http.get("/v1/models")
        assert 1 <= int(response.headers["retry-after"]) <= 21
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert served.http.get("/health").status_code == 200


def test_keys_do_not_share_prefixes() -> None:
    """Ask 12: what was cached for one tells the other nothing, nor for one user of a key."""
    with serving(spell("abc"), api_keys=("one", "two")) as served:
        salts = []
        add = served.service.built.engine.add

        def noting(request: object) -> object:
            salts.append(request.scheduling.cache_salt)  # type: ignore[attr-defined]
            return add(request)  # type: ignore[arg-type]

        served.service.built.engine.add = noting  # type: ignore[method-assign,assignment]
        for key, fields in (
            ("one", {}),
            ("one", {}),
            ("two", {}),
            ("one", {"user": "u"}),
            ("one", {"cache_salt": "s"}),
        ):
            served.post(
                CHAT,
                {"messages": [{"role": "user", "content": "hi"}], **fields},
                headers={"Authorization": f"Bearer {key}"},
            )
        assert salts[0] == salts[1]
        assert len(set(salts)) == 4
        assert "one" not in "".join(salts)


def test_nothing_of_a_prompt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving(spell("the secret answer")) as served, caplog.at_level(logging.DEBUG, "martlet"):
        logging.getLogger("martlet.server").propagate = True
        served.chat("the secret prompt")
        served.post(CHAT, b'{"messages": "the secret mistake"}')
        served.post(CHAT, b'{"the secret junk')
    assert any(CHAT in record.getMessage() for record in caplog.records)
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"port": 70_000}, "port"),
        ({"tls_cert": "a.pem"}, "tls_key"),
        ({"tls_cert": "/nowhere.pem", "tls_key": "/nowhere.pem"}, "tls_cert"),
        ({"api_keys": ("with space",)}, "api_keys"),
        ({"max_n": 0}, "max_n"),
        ({"metrics_prefix": "a b"}, "metrics_prefix"),
    ],
)
def test_wrong_settings(given: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ServerSettings(**given)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_metrics_under_vllms_names() -> None:
    with serving(spell("abc"), metrics_prefix="vllm") as served:
        served.chat()
        text = served.http.get("/metrics").text
    for name in ("vllm:time_to_first_token_seconds_bucket", "vllm:num_requests_running", "vllm:generation_tokens_total",
                 "vllm:e2e_request_latency_seconds_sum", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total"):  # fmt: skip
        assert re.search(rf'^{name}{{.*model_name="scripted".*}} ', text, re.MULTILINE), name
    # "abc" and its end: four tokens, the prompt has seven, and three gaps lie between four tokens.
    assert 'vllm:request_generation_tokens_bucket{le="5.0",model_name="scripted"} 1.0' in text
    assert 'vllm:request_generation_tokens_bucket{le="2.0",model_name="scripted"} 0.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="scripted"} 3.0' in text
    assert 'vllm:prompt_tokens_total{model_name="scripted"} 7.0' in text


def test_tls(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not here to make a certificate")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    subprocess.run([*make, *subject], check=True, capture_output=True)
    with serving(spell("abc"), tls_cert=cert, tls_key=key) as served:
        assert served.base.startswith("https://")
        with httpx.Client(base_url=served.base, verify=ssl.create_default_context(cafile=cert)) as client:
            assert client.get("/health").json() == {"status": "ok", "trouble": None}


def test_other_commands_do_not_import_the_server() -> None:
    """The first token of `martlet run` does not wait for it."""
    code = "import sys, martlet.cli, martlet.commands.run, martlet.llm; print(sorted(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert "'martlet.llm'" in done.stdout
    for name in ("starlette", "uvicorn", "pydantic", "orjson", "asyncio", "prometheus_client", "martlet.server"):
        assert f"'{name}'" not in done.stdout


# -- the process -----------------------------------------------------------------------------------
def start(tmp_path: Path, model: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start `martlet serve` and wait until it says that it is ready."""
    command = [sys.executable, "-m", "martlet", "serve", str(model), *options]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"ready at (\S+) after ([0-9.]+) s", line):
            return process, match[1]
    raise AssertionError("it has ended")


@pytest.mark.model
def test_process_from_start_to_end(tmp_path: Path, smollm2_path: Path) -> None:
    """Faults OPS-03, OPS-05: the port is closed until requests are answered; SIGTERM ends streams,
    and it, with 0.
    """
    process, base = start(tmp_path, smollm2_path, "-p", "0", "--shutdown-timeout", "0.5", "-c", "2048")
    try:
        with httpx.Client(base_url=base, timeout=60) as client:
            assert client.get("/ready?deep=1").json()["ready"]
            body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
            whole = client.post(CHAT, json=body).json()
            assert whole["choices"][0]["message"]["content"]
            assert client.post(CHAT, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            endless = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=endless) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("data: ")
                process.send_signal(signal.SIGTERM)
                begin = time.monotonic()
                rest = [line for line in lines if line]
            assert '"code":"shutting_down"' in rest[-1]
            assert process.wait(10) == 0
            assert time.monotonic() - begin < 10
    finally:
        process.kill()
        process.wait()


@pytest.mark.model
def test_unix_socket(tmp_path: Path, smollm2_path: Path) -> None:
    path = tmp_path / "martlet.sock"
    process, address = start(tmp_path, smollm2_path, "--unix-socket", str(path), "-c", "256", "--backend", "null")
    try:
        assert address == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/ready").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
