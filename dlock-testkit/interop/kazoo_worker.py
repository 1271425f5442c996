"""Takes a lock of kazoo again and again, and prints when it held it, one line each: the
kind (X exclusive, R shared) and the times of begin and end, in nanoseconds of the monotonic
clock that all processes of the machine share.

    python kazoo_worker.py HOST:PORT KIND PATH SECONDS

KIND is mutex, read or write.

    python kazoo_worker.py bench HOST:PORT hot|own TASKS SECONDS

Counts how often threads take and release a lock: the same one, or one each.
"""

import sys
import threading
import time

from kazoo.client import KazooClient


def now():
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def work(host, kind, path, seconds):
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


def bench(host, keys, tasks, seconds):
    client = KazooClient(hosts=host, timeout=10)
    client.start()
    waits = []
    end = now() + int(seconds) * 1_000_000_000

    def cycle(task):
        path = "/bench/kazoo" if keys == "hot" else f"/bench/kazoo-{task}"
        lock = client.Lock(path)
        while now() < end:
            asked = now()
            lock.acquire()
            waits.append(now() - asked)
            lock.release()

    threads = [threading.Thread(target=cycle, args=(task,)) for task in range(int(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.stop()
    waits.sort()
    p50, p99 = (waits[len(waits) * part // 100] / 1e6 for part in (50, 99))
    print(f"{len(waits) / int(seconds):.1f} locks/s, p50 {p50:.2f}ms, p99 {p99:.2f}ms")


if sys.argv[1] == "bench":
    bench(*sys.argv[2:])
else:
    work(*sys.argv[1:])
