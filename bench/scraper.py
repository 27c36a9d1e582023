"""Scrape a URL at an interval, as Prometheus would: `python -m bench.scraper URL PATH INTERVAL_S NUM`.

Pages that are not there (yet) are tried again at the next interval. After NUM pages, 0 meaning never, the times they
took are written in milliseconds, as JSON.
"""

import sys
import time

import msgspec

from bench.workplace import fetch


def main(url: str, path: str, interval_s: str, num: str) -> None:
    """Scrape until done or killed."""
    times_ms: list[float] = []
    while not int(num) or len(times_ms) < int(num):
        start_s = time.perf_counter()
        try:
            fetch(url, path)
            times_ms.append((time.perf_counter() - start_s) * 1e3)
        except OSError:
            pass
        time.sleep(float(interval_s))
    sys.stdout.write(msgspec.json.encode(times_ms).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
