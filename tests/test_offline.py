"""`--offline`: nothing of the process reaches another machine. Each case runs in a process of its
own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import socket
from martlet.errors import UnsupportedError
from martlet.offline import forbid_network
forbid_network()
try:
    {action}
except UnsupportedError as error:
    print("refused:", error)
except OSError:
    print("tried")
else:
    print("done")
"""


def outcome(action: str) -> str:
    code = CODE.format(action=action)
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize(
    "action",
    [
        "socket.create_connection(('192.0.2.1', 80), 0.2)",
        "socket.create_connection(('example.invalid', 443), 0.2)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))",
        "socket.socket(socket.AF_INET6).connect(('2001:db8::1', 80))",
        "__import__('urllib.request').request.urlopen('http://example.invalid', timeout=0.2)",
    ],
)
def test_other_machines_are_refused(action: str) -> None:
    found = outcome(action)
    assert found.startswith("refused:")
    assert "--offline" in found


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("socket.create_connection(('127.0.0.1', 1), 0.2)", "tried"),  # nobody listens there
        ("socket.getaddrinfo('localhost', 80)", "done"),
        # an address needs no look-up: of this machine's own, say
        ("socket.getaddrinfo('192.0.2.1', 80)", "done"),
        ("(lambda pair: pair[0].send(b'x'))(socket.socketpair())", "done"),
    ],
)
def test_this_machine_is_not(action: str, expected: str) -> None:
    assert outcome(action).strip() == expected
