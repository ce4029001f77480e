"""The files of deploy/ name what there is: options, routes, files of the repository; and they agree with each other."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from headway.cli import serve
from headway.server.edge.edge import OPEN_PATHS
from headway.server.settings import ServerSettings

DEPLOY = Path(__file__).parent.parent / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
MANIFESTS = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def check_options(words: list[str]) -> None:
    """That `headway serve` takes them."""
    context = typer.main.get_command(serve.app).make_context("serve", list(words), resilient_parsing=True)
    assert context.params["model"], words


@pytest.fixture
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "headway.service")
    return parser


def test_the_container_file() -> None:
    for sources in re.findall(r"^COPY (.+) \S+$", CONTAINERFILE, re.MULTILINE):
        assert all((DEPLOY.parent / source).exists() for source in sources.split()), sources
    assert 'ENTRYPOINT ["headway", "serve"]' in CONTAINERFILE and "EXPOSE 8000" in CONTAINERFILE
    assert ServerSettings().port == 8000 and ServerSettings().host == "0.0.0.0"
    assert "/health" in CONTAINERFILE and "/health" in OPEN_PATHS
    (command,) = re.findall(r"^#   podman run .* headway (.+)$", CONTAINERFILE, re.MULTILINE)
    check_options(shlex.split(command))


def test_the_service_of_systemd(unit: configparser.ConfigParser) -> None:
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "headway" and command == "serve"
    check_options([word for word in arguments if word not in ("--config", "/etc/headway.toml")])
    assert "--config" in arguments and unit["Service"]["ExecReload"].startswith("/bin/kill -HUP")
    assert int(unit["Service"]["TimeoutStopSec"]) > ServerSettings().shutdown_timeout
    assert f"/var/cache/{unit['Service']['CacheDirectory']}" in unit["Service"]["Environment"]


def test_the_manifests_of_kubernetes() -> None:
    pod: dict[str, Any] = MANIFESTS["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    check_options(container["args"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > ServerSettings().shutdown_timeout
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS, "a probe has no key"
    assert container["livenessProbe"]["httpGet"]["path"] != "/health"
    user = int(re.findall(r"^USER (\d+)$", CONTAINERFILE, re.MULTILINE)[0])
    assert pod["spec"]["securityContext"]["runAsUser"] == user and f"--uid {user}" in CONTAINERFILE
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"/cache"} and "VOLUME /cache" in CONTAINERFILE
    labels = pod["metadata"]["labels"]
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    (key,) = container["env"]
    assert key["name"] == "HEADWAY_API_KEY" and MANIFESTS["Secret"]["stringData"].keys() == {"api-key"}
