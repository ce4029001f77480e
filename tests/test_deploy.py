"""The files of deploy/ name what there is: options, routes, files of the repository; and they agree with each other."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli import command_of
from headway.gateway.deployed.file import read_deploy_file
from headway.server.edge.edge import OPEN_PATHS
from headway.server.settings import ServerSettings

DEPLOY = Path(__file__).parent.parent / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
MANIFESTS = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def check_options(words: list[str]) -> None:
    """That `headway serve` takes them."""
    context = command_of("serve").make_context("serve", list(words), resilient_parsing=True)
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


def test_the_job_of_ray_deploys_a_file_that_is_read(tmp_path: Path) -> None:
    """Its types are those of KubeRay's definition, which is not here: whoever changes it checks it against that."""
    found = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text())}
    path = tmp_path / "deploy.toml"
    path.write_text(found["ConfigMap"]["data"]["deploy.toml"])
    (deployment,) = read_deploy_file(str(path)).deployments
    job = found["RayJob"]["spec"]
    program, name, *words = shlex.split(job["entrypoint"])
    context = command_of("deploy").make_context(name, list(words), resilient_parsing=True)
    assert program == "headway" and context.params["address"] == "auto" and not context.args
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    volumes = {each["name"]: each["configMap"]["name"] for each in head["volumes"]}
    (mount,) = head["containers"][0]["volumeMounts"]
    assert context.params["file"] == f"{mount['mountPath']}/deploy.toml"
    assert volumes[mount["name"]] == found["ConfigMap"]["metadata"]["name"]
    for group in job["rayClusterSpec"]["workerGroupSpecs"]:
        cpus = float(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        assert deployment.num_cpus <= cpus and deployment.rule.most <= group["maxReplicas"]
