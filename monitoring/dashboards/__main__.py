"""Write the JSON file of every dashboard: `make dashboards`."""

from pathlib import Path

from monitoring.dashboards.builder import text_of
from monitoring.dashboards.hardware import HARDWARE
from monitoring.dashboards.run import RUN
from monitoring.dashboards.sidecar import SIDECAR

FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"
PAGES = (RUN, HARDWARE, SIDECAR)


def main() -> None:
    """Write all files."""
    for page in PAGES:
        (FOLDER / f"{page.name}.json").write_text(text_of(page))


if __name__ == "__main__":
    main()
