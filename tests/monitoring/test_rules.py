"""Alerts and recording rules: promtool accepts them, each fires when it should and only then, each says what to do."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring_queries import MONITORING
from prometheus_server import binary

RULES = sorted((MONITORING / "prometheus" / "rules").glob("*.yml"))
CASES = sorted((Path(__file__).parent / "rules").glob("*.yml"))
NEEDS_PROMTOOL = pytest.mark.skipif(binary("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run promtool to its end."""
    command = [binary("promtool") or "promtool", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def alerts() -> list[dict[str, Any]]:
    """All alerting rules."""
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@NEEDS_PROMTOOL
@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_alerts_fire_when_they_should(file: Path) -> None:
    """Promtool plays made-up series to the rules and finds exactly the alerts that the cases name."""
    done = promtool("test", "rules", str(file))

    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMTOOL
def test_configuration_is_accepted() -> None:
    """The server's configuration and every rule file that it names have no finding."""
    done = promtool("check", "config", str(MONITORING / "prometheus" / "prometheus.yml"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rule files found" in done.stdout


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    """No alert is without a test, and no test passes because nothing ever fires or everything always does."""
    tested = {}
    for file in CASES:
        for case in yaml.safe_load(file.read_text())["tests"]:
            outcomes = {bool(check["exp_samples"]) for check in case["promql_expr_test"]}
            assert all(f'"{case["name"]}"' in check["expr"] for check in case["promql_expr_test"])
            tested[case["name"]] = outcomes

    assert tested == {rule["alert"]: {False, True} for rule in alerts()}


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    """Each has a severity, one line that says what is wrong and where, what that means, and what to do first."""
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "action"}, rule["alert"]
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"], rule["alert"]
        assert all(text.endswith(".") for text in rule["annotations"].values()), rule["alert"]


def test_every_recorded_series_is_used() -> None:
    """A recording rule is read by an alert, or its name says that it is for long views."""
    recorded = {rule["record"] for group in yaml.safe_load(_text("recording.yml"))["groups"] for rule in group["rules"]}
    read = {name for rule in alerts() for name in re.findall(r"dflash:\w+:\w+", rule["expr"])}

    assert read <= recorded
    assert recorded - read == {"dflash:steps:rate5m", "dflash:tokens:rate5m", "dflash:joules_per_token:ratio_rate5m"}


def _text(name: str) -> str:
    return (MONITORING / "prometheus" / "rules" / name).read_text()
