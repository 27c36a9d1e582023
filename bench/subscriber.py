"""A subscriber that takes everything from one endpoint until killed: `python -m bench.subscriber SOCKET`."""

import sys

import zmq

from shared.wire import LIVE_TOPICS


def main(path: str) -> None:
    """Receive for ever; say so at the first message."""
    socket = zmq.Context().socket(zmq.SUB)
    for topic in LIVE_TOPICS:
        socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect(f"ipc://{path}")
    socket.recv_multipart()
    sys.stdout.write("receiving\n")
    sys.stdout.flush()
    while True:
        socket.recv_multipart()


if __name__ == "__main__":
    main(*sys.argv[1:])
