"""The files that set up Prometheus, Alertmanager and Grafana fit together, and name only what there is."""

import re
import subprocess
from typing import Any

import pytest
import yaml
from alertmanager_server import alertmanager_binary
from monitoring_queries import MONITORING
from prometheus_server import binary


def read(name: str) -> Any:
    """A YAML file of monitoring/."""
    return yaml.safe_load((MONITORING / name).read_text())


def test_compose_mounts_what_there_is() -> None:
    """Each mounted folder exists, and each program is told to read a file that lies in what is mounted for it."""
    services = read("compose.yml")["services"]
    assert set(services) == {"prometheus", "alertmanager", "grafana"}
    for service in services.values():
        mounts = [volume.split(":") for volume in service["volumes"] if volume.startswith("./")]
        assert all((MONITORING / mount[0]).is_dir() and mount[2] == "ro" for mount in mounts)
        inside = {mount[1]: MONITORING / mount[0] for mount in mounts}
        for option in service.get("command", ()):
            if found := re.fullmatch(r"--config\.file=(.*)/([^/]+)", option):
                assert (inside[found[1]] / found[2]).is_file()


def test_nothing_of_compose_listens_beyond_this_machine() -> None:
    """All three use the network of the host, and loopback alone."""
    services = read("compose.yml")["services"]
    for name in ("prometheus", "alertmanager"):
        assert any(option.startswith("--web.listen-address=127.0.0.1:") for option in services[name]["command"])
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "--cluster.listen-address=" in services["alertmanager"]["command"]


def test_provisioning_reads_what_compose_gives() -> None:
    """Variables in provisioning files are those that compose sets; the folder of dashboards is the mounted one."""
    grafana = read("compose.yml")["services"]["grafana"]
    files = (MONITORING / "grafana" / "provisioning").rglob("*.yml")
    variables = {name for file in files for name in re.findall(r"\$([A-Z_]+)", file.read_text())}

    assert variables == {"PROMETHEUS_URL", "DFLASH_DASHBOARDS"}
    assert variables <= set(grafana["environment"])
    assert f"./grafana/dashboards:{grafana['environment']['DFLASH_DASHBOARDS']}:ro" in grafana["volumes"]


def test_grafana_knows_the_scrape_interval() -> None:
    """Grafana derives the range of every rate from it, so a wrong one gives empty or smeared graphs."""
    [source] = read("grafana/provisioning/datasources/dflash.yml")["datasources"]

    assert source["jsonData"]["timeInterval"] == read("prometheus/prometheus.yml")["global"]["scrape_interval"]


def test_inhibitions_name_alerts() -> None:
    """What Alertmanager holds back, and because of what, are alerts of ours."""
    files = (MONITORING / "prometheus" / "rules").glob("alerts-*.yml")
    names = {name for file in files for name in re.findall(r"alert: (\w+)", file.read_text())}
    rules = read("alertmanager/alertmanager.yml")["inhibit_rules"]
    held = {name for rule in rules for name in re.findall(r"Dflash\w+", str(rule))}

    assert held <= names


@pytest.mark.skipif(alertmanager_binary() is None or binary("amtool") is None, reason="amtool is not installed")
def test_alertmanagers_configuration_is_accepted() -> None:
    """Alertmanager's own tool has no complaint."""
    file = str(MONITORING / "alertmanager" / "alertmanager.yml")
    done = subprocess.run(
        [binary("amtool") or "amtool", "check-config", file], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
