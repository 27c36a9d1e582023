"""The committed dashboards against Grafana's own types: every key known, every value of its type."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from monitoring_queries import DASHBOARDS
from sidecar_process import Place

PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
OF_THE_DATA_SOURCE = ("expr", "step", "textFormat", "titleFormat", "useValueForTime")
"""What Grafana's Prometheus data source reads of an annotation; the schema leaves keys of data sources open."""
MODULE = """
import type { Dashboard } from '@grafana/schema';
// In JSON the value of an enumeration is its text.
type InJson<T> = T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? InJson<U>[]
  : { [K in keyof T]: InJson<T[K]> };
export const dashboard: InJson<Dashboard> = """

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Grafana's types and the compiler."""
    folder = tmp_path_factory.mktemp("types")
    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1")
    command = ["npm", "install", *options, *PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install {PACKAGES}: {done.stderr.strip()[:300]}")
    return folder


def complaints(project: Path, name: str, document: dict[str, Any]) -> str:
    """What the compiler says about a dashboard."""
    for annotation in document["annotations"]["list"]:
        for key in OF_THE_DATA_SOURCE:
            annotation.pop(key)
    (project / f"{name}.ts").write_text(f"{MODULE}{json.dumps(document, indent=1)};\n")
    options = ("--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler", "--module", "esnext")
    command = [str(project / "node_modules/.bin/tsc"), *options, f"{name}.ts"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False).stdout


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_dashboard_has_grafanas_types(project: Path, file: Path) -> None:
    """The compiler has no complaint."""
    assert complaints(project, file.stem, json.loads(file.read_text())) == ""


def test_dashboard_of_definitions_has_grafanas_types(project: Path, place: Place) -> None:
    """The compiler has no complaint about what `dflash-sidecar dashboard` writes."""
    document = json.loads(place.command("dashboard", "dflash_tokens_per_second", "dflash_padding_ratio").stdout)

    assert complaints(project, "custom", document) == ""


@pytest.mark.parametrize("mistake", ["unknown key", "wrong enumeration", "wrong type"])
def test_check_sees_mistakes(project: Path, mistake: str) -> None:
    """A key that is unknown, a value that is none of its enumeration, and text for a number are complaints."""
    document = json.loads(DASHBOARDS[0].read_text())
    if mistake == "unknown key":
        document["links"][0]["asDropDown"] = True
    elif mistake == "wrong enumeration":
        document["panels"][2]["fieldConfig"]["defaults"]["thresholds"]["mode"] = "relative"
    else:
        document["panels"][1]["gridPos"]["x"] = "0"

    assert "error TS" in complaints(project, "mistaken", document)
