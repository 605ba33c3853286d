"""`--offline`: a process without network (read `config.py` next, which has the setting).

Martlet itself opens a connection only to fetch a model by name. `forbid_network` makes that a
guarantee for the whole process, libraries included, through audit events (PEP 578).
"""

import ipaddress
import socket
import sys
from typing import Any

from martlet.errors import UnsupportedError


def forbid_network() -> None:
    """Refuse connections to other machines, and look-ups of their names, until the process ends.

    Sockets of this machine (loopback, Unix) still work. Audit hooks cannot be removed: call it from
    a program, not from a library.
    """
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto"):
        opened, address = arguments[0], arguments[1]
        if opened.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            raise UnsupportedError(f"A connection to {address[0]} was refused because of --offline")
    elif event == "socket.getaddrinfo" and not _is_local(arguments[0]) and _address(arguments[0]) is None:
        raise UnsupportedError(f"The look-up of {arguments[0]} was refused because of --offline")


def _is_local(host: object) -> bool:
    if host in (None, "", b"", "localhost", b"localhost"):
        return True
    address = _address(host)
    return address is not None and (address.is_loopback or address.is_unspecified)


def _address(host: object) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host written as an IP address, which needs no look-up; None for a name."""
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    try:
        return ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return None
