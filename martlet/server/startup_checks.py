"""Checks before the port opens: the address before the model loads, then the model's self-test.

`check_listening` reports a port in use, a bad socket path or a wrong TLS file in one line, not in a
traceback after the load. `check_model` finds a damaged file, a wrong kernel or a wrong rotary
embedding: they make a model write nonsense without any error. A language model's continuation of
"1, 2, 3, …" is known without a recorded answer. `KNOWN_FILES` are the models that were seen to
count with every type of keys and values but the 4-bit one. Read `lifecycle.py` next.
"""

import errno
import socket
import ssl
import stat
from pathlib import Path

from martlet.engine.build import Built
from martlet.engine.driver import Driver
from martlet.engine.prompts import PromptTokens
from martlet.engine.requests import RequestMaker
from martlet.errors import MartletError, RequestError
from martlet.server.settings import ServerSettings

MAX_SOCKET_PATH = 107  # bytes in Linux's sockaddr_un; other systems have fewer
COUNTING, EXPECTED = "1, 2, 3, 4, 5, 6, 7, 8,", " 9, 10, 11, 12"
SELF_TEST_TOKENS = 16
KNOWN_FILES = {("SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432)}  # name and bytes


def check_listening(settings: ServerSettings) -> None:
    """Raise RequestError, naming the setting, if the server cannot listen as configured."""
    if settings.unix_socket is not None:
        _check_socket(Path(settings.unix_socket))
    else:
        _check_port(settings.host, settings.port)
    if settings.tls_cert is not None and settings.tls_key is not None:
        _check_tls(settings.tls_cert, settings.tls_key)


def _check_socket(path: Path) -> None:
    def refused(why: str) -> RequestError:
        return RequestError(f"unix_socket: {why}.", param="unix_socket")

    if (size := len(str(path).encode())) > MAX_SOCKET_PATH:
        raise refused(f"the path has {size} bytes; the system takes at most {MAX_SOCKET_PATH}")
    if not path.parent.is_dir():
        raise refused(f"there is no folder {str(path.parent)!r}")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise refused(f"{str(path)!r} is {'a folder' if stat.S_ISDIR(mode) else 'there, and no socket'}")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(str(path)) == 0:  # else a server that is gone left it; it will be replaced
            raise refused(f"another server listens on {str(path)!r}")


def _check_port(host: str, port: int) -> None:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"host: {host!r} is no address of this machine: {error}.", param="host") from None
    for family, socket_type, protocol, _, address in addresses:
        with socket.socket(family, socket_type, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise RequestError(
                        f"port: another program listens on {port} of {host}; choose another, or 0 for any.",
                        param="port",
                    ) from None
                param = "port" if error.errno == errno.EACCES else "host"
                raise RequestError(
                    f"{param}: {host}, port {port}, cannot be listened on: {error.strerror}.", param=param
                ) from None


def _check_tls(cert: str, key: str) -> None:
    def no_password() -> str:
        raise RequestError("tls_key: the key is encrypted; give one without a password.", param="tls_key")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise RequestError(f"tls_key: {key!r} is not the key of {cert!r}.", param="tls_key") from None
        raise RequestError(
            f"tls_cert: {cert!r} and {key!r} are no certificate and key in PEM: {error.reason or error}.",
            param="tls_cert",
        ) from None
    except OSError as error:
        raise RequestError(
            f"tls_cert: {cert!r} or {key!r} cannot be read: {error.strerror}.", param="tls_cert"
        ) from None


def check_model(built: Built) -> bool:
    """Let a known model count; False if the model is not a known one.

    Raises MartletError, after closing the model, if it does not count.
    """
    config, path = built.config, Path(built.config.model)
    is_known = (path.name, path.stat().st_size) in KNOWN_FILES
    if not is_known or "q4" in config.kv_dtype or config.backend == "null":
        return False
    prompt = PromptTokens(built.tokenizer.encode(COUNTING), COUNTING)
    params = {"max_tokens": SELF_TEST_TOKENS, "temperature": 0.0}
    driver = Driver(built.engine, built.tokenizer)
    try:
        [output] = driver.run([RequestMaker(built).asked("self-test", prompt, params)])
    finally:
        driver.close()
    answer = output.error or output.outputs[0].text
    if not answer.startswith(EXPECTED):
        built.close()
        raise MartletError(
            f"{path.name} does not answer as it should: after {COUNTING!r} it wrote {answer!r:.120}, expected"
            f" {EXPECTED!r}. Its file may be damaged: fetch it again. --no-self-test serves it as it is."
        )
    return True
