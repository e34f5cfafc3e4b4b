"""Process that has imported what commands need, and runs each command in a copy of itself.

Most commands of the documentation import for longer than they work. `python -m
tests.e2e.ready_process SOCKET` listens there until it is killed; `CLIENT` sends it a command.
"""

import json
import os
import socket
import sys
from importlib import import_module
from socketserver import BaseRequestHandler, ForkingMixIn, UnixStreamServer

from sightline.__main__ import main

MODULES = (
    *("sightline.commands.load", "sightline.commands.translate", "sightline.service.loading"),
    *("sightline.commands.train", "sightline.model.train_command", "torch._dynamo"),
)
CLIENT = """\
#!{python} -IS
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    socket.send_fds(server, [json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
    sys.exit(server.recv(1)[0])
"""


class Command(BaseRequestHandler):
    """Runs a command in a copy of the process, with streams, folder and variables of the client."""

    def handle(self) -> None:
        message, streams, _, _ = socket.recv_fds(self.request, 1 << 20, 3)
        sys.argv, folder, environment = json.loads(message)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        try:
            status = main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        sys.stdout.flush()
        self.request.sendall(bytes([status]))


class Server(ForkingMixIn, UnixStreamServer):
    pass


if __name__ == "__main__":
    for module in MODULES:
        import_module(module)
    with Server(sys.argv[1], Command) as server:
        server.serve_forever()
