"""A process that means a trainer's socket no good, until it is killed: `hostile_subscriber.py PATH SESSION HABIT`.

`replays` asks for thousands of replays, overlapping, huge, of other sessions, reads none and never takes one back;
`topics` subscribes to a new long random topic all the time; both connect again when they are cut off.
"""

import itertools
import os
import sys
import time

import zmq

PAUSE_S = 0.0001


def requests(session: str, number: int) -> bytes:
    """One request of many kinds."""
    ranges = ((0, 2**52), (0, 5_000), (number % 97, 2_000 + number % 89), (2**40, 2**41), (5, 5))
    first, end = ranges[number % len(ranges)]
    return f"replay/{'other' if number % 7 == 0 else session}/{first}/{end}/n{number}".encode()


def main(path: str, session: str, habit: str) -> None:
    """Subscribe for ever, over three sockets that are never read."""
    context = zmq.Context()
    sockets = [context.socket(zmq.SUB) for _ in range(3)]
    for subscriber in sockets:
        subscriber.setsockopt(zmq.RCVHWM, 1)
        subscriber.connect(f"ipc://{path}")
    for number in itertools.count():
        topic = requests(session, number) if habit == "replays" else os.urandom(90).hex().encode()
        sockets[number % len(sockets)].setsockopt(zmq.SUBSCRIBE, topic)
        if number % 20_000 == 0 and number:
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
        time.sleep(PAUSE_S if number > 10_000 else 0.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
