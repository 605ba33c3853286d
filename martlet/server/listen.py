"""What a server will listen with, looked at before a model is loaded for it (read `lifecycle.py` next).

A port that is taken, a socket's path that cannot be, or a certificate without its key is said in a line and at once, not in
a traceback after the loading.
"""

from __future__ import annotations

import errno
import socket
import ssl
import stat
from pathlib import Path

from martlet.errors import RequestError
from martlet.server.settings import ServerSettings

__all__ = ["check_listening"]

MAX_SOCKET_PATH = 107  # bytes, of Linux's sockaddr_un; others have fewer


def check_listening(settings: ServerSettings) -> None:
    """RequestError, naming the setting, for what cannot be listened with."""
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
    with socket.socket(socket.AF_UNIX) as found:
        found.settimeout(1.0)
        if found.connect_ex(str(path)) == 0:  # else it was left behind by a server that is gone, and will be replaced
            raise refused(f"another server listens on {str(path)!r}")


def _check_port(host: str, port: int) -> None:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"host: {host!r} is no address of this machine: {error}.", param="host") from None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                found.bind(address)
                found.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    said = f"port: another program listens on {port} of {host}; choose another, or 0 for any"
                    raise RequestError(f"{said}.", param="port") from None
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
