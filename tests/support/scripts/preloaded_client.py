"""`preloaded_client.py SOCKET WORD…`: has another process run `python WORD…`, with what this one has: its standard
files, folder and variables. Signals go there, and this process ends as that one does. `support/preloaded.py` answers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


files = [number for number in range(3) if is_open(number)]
while os.open(os.devnull, os.O_RDWR) < 2:  # the connection does not take the number of a standard file that is closed
    pass
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(sys.argv[1])
request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ), files]).encode()
for number in PASSED_ON:
    signal.signal(number, lambda number, _: server.send(bytes([number])))
socket.send_fds(server, [request], files)
status = int(server.recv(16) or 1)
if status < 0:
    if -status in PASSED_ON:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
