"""A sidecar with TLS as a process: scraped, asked and stopped like one without, by whoever believes its certificate."""

import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificate import needs_openssl, self_signed
from prometheus_server import prometheus_scraping
from sidecar_process import Place, wait_for

pytestmark = needs_openssl


class SecurePlace(Place):
    """A place with a certificate, and the options that use it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.http = self_signed(path)
        self.tls = ("--set", f"http.tls_cert={self.http.tls_cert}", "--set", f"http.tls_key={self.http.tls_key}")
        self.places = ("--state-dir", str(self.state_dir), "--listen", "127.0.0.1:0")
        self.environ["DFLASH_WANDB_MODE"] = "off"

    def url(self) -> str:
        """Where the sidecar says it is."""
        url: str = json.loads((self.state_dir / "sidecar.lock").read_text())["url"]
        return url


@pytest.fixture
def place(tmp_path: Path) -> Iterator[SecurePlace]:
    """An empty place; a sidecar that was left there is stopped."""
    place = SecurePlace(tmp_path)
    yield place
    place.command("stop", *place.places, *place.tls)
    place.close()


def test_start_status_scrape_and_stop(place: SecurePlace) -> None:
    """Everything works over HTTPS alone: by `start`, `status`, urllib with the certificate, and `stop`."""
    place.trainer()
    started = place.command("start", *place.places, *place.tls)
    again = place.command("start", *place.places, *place.tls)
    context = ssl.create_default_context(cafile=place.http.tls_cert)

    def page() -> str:
        with urllib.request.urlopen(place.url() + "/metrics", context=context, timeout=10) as response:
            return str(response.read().decode())

    wait_for(lambda: "\ndflash_trainer_up 1.0" in page(), "the trainer")
    status = place.command("status", "--json", *place.places, *place.tls)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(place.url().replace("https", "http") + "/metrics", timeout=10)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(place.url() + "/metrics", timeout=10)
    stopped = place.command("stop", *place.places, *place.tls)

    assert started.stdout.startswith("sidecar started: pid "), started
    assert ", https://127.0.0.1:" in started.stdout
    assert again.stdout.startswith("sidecar already running: pid ")
    assert json.loads(status.stdout)["sidecar"]["url"].startswith("https://")
    assert stopped.stdout.startswith("sidecar stopped: pid ")
    assert "Traceback" not in (place.state_dir / "sidecar.log").read_text()


def test_status_believes_the_configured_certificate_alone(place: SecurePlace) -> None:
    """Without a certificate, with another one, or with a file that is none, `status` says so and shows nothing."""
    place.command("start", *place.places, *place.tls)
    other = self_signed(place.state_dir.parent, "other")
    both = ("--set", f"http.tls_cert={other.tls_cert}", "--set", f"http.tls_key={other.tls_key}")
    rubbish = place.state_dir.parent / "rubbish.pem"
    rubbish.write_text("x")
    none = ("--set", f"http.tls_cert={rubbish}", "--set", f"http.tls_key={rubbish}")
    results = [place.command("status", *place.places, *options) for options in ((), both, none)]

    words = ("speaks TLS: give its http.tls_cert", "does not show the certificate in", "holds no certificate in PEM")
    for done, text in zip(results, words, strict=True):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert text in done.stderr


def test_public_bind_is_refused_by_the_program(place: SecurePlace) -> None:
    """`run` on all addresses ends with one line; half of TLS is named as such; with both halves it runs."""
    public = ("run", "--state-dir", str(place.state_dir), "--listen", "0.0.0.0:0")
    bare = place.command(*public)
    half = place.command(*public, *place.tls[:2])
    started = place.command("start", *public[1:], *place.tls)
    status = place.command("status", *public[1:], *place.tls)

    assert (bare.returncode, bare.stderr.count("\n")) == (1, 1)
    assert "http.allow_public=true" in bare.stderr
    assert (half.returncode, half.stderr) == (
        2,
        "dflash-sidecar: http.tls_key is not set: TLS needs both, a certificate and its key\n",
    )
    assert ", https://0.0.0.0:" in started.stdout
    assert status.returncode == 0


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_scrapes_it(place: SecurePlace, tmp_path: Path) -> None:
    """A real Prometheus with `scheme: https` and the certificate as its CA has the sidecar's series."""
    place.trainer()
    place.command("start", *place.places, *place.tls)
    (tmp_path / "prometheus").mkdir()
    port = int(place.url().rpartition(":")[2])
    with prometheus_scraping(port, tmp_path / "prometheus", place.http.tls_cert) as server:
        wait_for(lambda: server.values("dflash_trainer_up") == [[1.0]], "a scrape")
        up = server.values("up")

    assert up == [[1.0]]


def test_openssl_sees_no_old_protocol(place: SecurePlace) -> None:
    """TLS 1.2 and 1.3 are spoken, 1.1 is not."""
    place.command("start", *place.places, *place.tls)
    port = place.url().rpartition(":")[2]
    spoken = {}
    for version in ("tls1_1", "tls1_2", "tls1_3"):
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", f"-{version}", "-cipher", "ALL:@SECLEVEL=0"]
        done = subprocess.run(command, input=b"", capture_output=True, check=False, timeout=20)
        spoken[version] = done.returncode == 0

    assert spoken == {"tls1_1": False, "tls1_2": True, "tls1_3": True}
