"""What a server cannot listen with is said in one line before a model is loaded; what a signal does
meanwhile.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from martlet.commands.serve import _keys_in
from martlet.errors import RequestError
from martlet.server.settings import ServerSettings
from martlet.server.startup_checks import check_listening
from martlet.toy import spell
from tests.server.serving import serving


def refused(param: str, match: str, **settings: object) -> None:
    with pytest.raises(RequestError, match=match) as error:
        check_listening(ServerSettings(**settings))  # type: ignore[arg-type]
    assert error.value.param == param
    assert "\n" not in str(error.value)
    assert not str(error.value).endswith("..")


def test_sockets_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused("unix_socket", "is a folder", unix_socket=str(tmp_path))
    refused("unix_socket", "is there, and no socket", unix_socket=str(tmp_path / "file"))
    refused("unix_socket", "has 1[0-9][0-9] bytes", unix_socket="/" + "x" * 120)
    refused("unix_socket", "there is no folder", unix_socket=str(tmp_path / "none" / "a"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_socket_of_a_server_that_runs_and_of_one_that_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        refused("unix_socket", "another server listens", unix_socket=path)
    # the file is still there, and will be replaced
    check_listening(ServerSettings(unix_socket=path))


def test_ports_and_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        refused("port", "another program listens on", port=other.getsockname()[1])
    refused("host", "cannot be listened on", host="203.0.113.7", port=0)
    check_listening(ServerSettings(port=0))

    def unknown(host: str, *args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    refused("host", "no address", host="no.such.host.invalid", port=0)


def made(*command: str) -> None:
    subprocess.run(["openssl", *command], check=True, capture_output=True)


def test_tls_files(tmp_path: Path) -> None:
    cert, key, other, locked, text = (str(tmp_path / name) for name in ("cert", "key", "other", "locked", "text"))
    made(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        cert,
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    )
    made("genrsa", "-out", other, "2048")
    made("rsa", "-in", key, "-aes128", "-passout", "pass:secret", "-out", locked)
    Path(text).write_text("hello")
    check_listening(ServerSettings(port=0, tls_cert=cert, tls_key=key))
    refused("tls_key", "is not the key of", port=0, tls_cert=cert, tls_key=other)
    refused("tls_key", "encrypted", port=0, tls_cert=cert, tls_key=locked)
    refused("tls_cert", "no certificate and key", port=0, tls_cert=text, tls_key=key)
    refused("tls_cert", "no certificate and key", port=0, tls_cert=cert, tls_key=text)


def test_a_file_of_keys_as_windows_writes_it(tmp_path: Path) -> None:
    """With a mark of byte order, CRLF, blank lines and comments: the keys, and nothing of the
    rest.
    """
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfsk-one\r\n\r\n  \r\n# old\r\n sk-two \r\n")
    assert _keys_in(str(path)) == ["sk-one", "sk-two"]
    with serving(spell("a"), api_keys=tuple(_keys_in(str(path)))) as served:
        for key, status in (("sk-one", 200), ("sk-two", 200), ("sk-three", 401)):
            assert served.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status
        served.http.headers["Authorization"] = "Bearer sk-one"
    for data, match in (
        (b"\xff\xfes\0k\0", "no text"),
        (b"\r\n#\r\n", "holds no API keys"),
        (b"", "holds no API keys"),
    ):
        path.write_bytes(data)
        with pytest.raises(RequestError, match=match):
            _keys_in(str(path))
    with pytest.raises(RequestError, match="cannot be read"):
        _keys_in(str(tmp_path))


SLOW = """
import sys, time
import martlet.engine.build as build
def slow(*args, **kwargs):
    print("loading", flush=True)
    time.sleep(60)
build.build = slow
from martlet.cli import main
sys.exit(main(["serve", sys.argv[1], "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_model_is_loading(number: signal.Signals, tmp_path: Path) -> None:
    """It ends the process at once, with status 0 and a line that says so, as it does once the
    server runs.
    """
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    start = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert time.monotonic() - start < 5
    assert process.returncode == 0
    assert said == "martlet: stopped by a signal before the server was ready\n"
