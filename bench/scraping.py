"""How long a scrape of `/metrics` takes while a trainer is live.

A page is rendered once per result, so the sidecar is set to make results faster than they are asked for: every scrape
that is measured pays for its page, as one every 15 seconds does.
"""

import msgspec

from bench.results import Result, alone, quantile
from bench.workplace import Workplace

RESULT_INTERVAL_S = 0.1
SCRAPE_INTERVAL_S = 0.1
NUM_SCRAPES = 60
TRAINER_RATE_HZ = 10
SCRAPE_TIMEOUT_S = 60.0


def scrape(num_rounds: int) -> list[Result]:
    """Milliseconds from the connection to the whole page."""
    with Workplace() as place:
        sidecar = place.sidecar(("--set", "wandb.mode=offline", "--set", f"interval_s={RESULT_INTERVAL_S}"))
        fleet = ("fleet", str(place.runtime_dir), "1", "0", str(TRAINER_RATE_HZ))
        trainer = place.popen(("-m", "bench.made_up_trainers", *fleet))
        place.wait(lambda: bool(sidecar.status()["trainers"]), trainer, "the trainer to be seen")
        rounds_ms = [_scrapes_ms(place, sidecar.url) for _ in range(num_rounds)]
    return [
        alone("scrape_median", "ms", [quantile(times_ms, 0.5) for times_ms in rounds_ms]),
        alone("scrape_p99", "ms", [quantile(times_ms, 0.99) for times_ms in rounds_ms]),
    ]


def _scrapes_ms(place: Workplace, url: str) -> list[float]:
    arguments = (url, "/metrics", str(SCRAPE_INTERVAL_S), str(NUM_SCRAPES))
    scraper = place.popen(("-m", "bench.scraper", *arguments))
    place.wait(lambda: scraper.poll() is not None, scraper, "the scrapes", SCRAPE_TIMEOUT_S)
    return msgspec.json.decode(place.output(scraper), type=list[float])
