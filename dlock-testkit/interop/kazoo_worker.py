"""Takes a lock of kazoo again and again, and prints when it held it, one line each: the
kind (X exclusive, R shared) and the times of begin and end, in nanoseconds of the monotonic
clock that all processes of the machine share.

    python kazoo_worker.py HOST:PORT KIND PATH SECONDS

KIND is mutex, read or write.
"""

import sys
import time

from kazoo.client import KazooClient


def now():
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def main():
    host, kind, path, seconds = sys.argv[1:]
    client = KazooClient(hosts=host, timeout=3)
    client.start()
    lock = {"mutex": client.Lock, "read": client.ReadLock, "write": client.WriteLock}[kind](path)
    print("ready", flush=True)
    sys.stdin.readline()  # all begin together
    end = now() + int(seconds) * 1_000_000_000
    while now() < end:
        with lock:
            begin = now()
            time.sleep(0.001)
            print("R" if kind == "read" else "X", begin, now(), flush=True)
    client.stop()
    print("done", flush=True)


main()
