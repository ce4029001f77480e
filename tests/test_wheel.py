"""The wheel has every file of the package, and what is installed of it serves."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import httpx
import pytest

from headway import __version__

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "headway"
# What setuptools would copy, without making a wheel: most of the time goes into compressing the bundled models.
OUTPUTS = """
from setuptools import Distribution
project = Distribution({"script_name": "setup.py"})
project.parse_config_files(["pyproject.toml"])
project.include_package_data = False  # which takes what an earlier build has listed, too
build = project.get_command_obj("build_py")
build.build_lib = "."
build.ensure_finalized()
print(*build.get_outputs(include_bytecode=0), sep="\\n")
"""


def in_repository() -> set[str]:
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(REPOSITORY)) for path in files}


def test_the_wheel_has_every_file_of_the_package() -> None:
    ran = subprocess.run([sys.executable, "-c", OUTPUTS], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert ran.returncode == 0, ran.stderr
    files = {os.path.normpath(line) for line in ran.stdout.splitlines()}
    assert in_repository() - files == set()
    assert {
        *(
            "headway/py.typed",
            "headway/kernels/cpu/kernels.py",
            "headway/kernels/cuda/kernels.py",
            "headway/text/templates/chatml.jinja",
        ),
        *("headway/bundled/story/model.safetensors", "headway/cost/tables/models.toml", "headway/report/page.html.j2"),
    } <= files


def test_the_command_of_the_wheel_is_there() -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["headway"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.slow
def test_what_is_installed_of_the_wheel_serves(tmp_path: Path) -> None:
    """In a fresh environment outside of the clone: what is missing in the wheel is missing here."""
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "headway", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("headway-*-py3-none-any.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    binaries = tmp_path / "venv" / "bin"
    subprocess.run([*pip, "--python", str(binaries / "python"), "install", *offline, str(wheel)], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Other packages are those of this environment; what is installed here comes first.
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = [str(binaries / "python"), "-c", "import headway; print(headway.__file__)"]
    assert subprocess.check_output(where, cwd=tmp_path, env=environment, text=True).startswith(str(site))
    said = subprocess.check_output([binaries / "headway", "--version"], cwd=tmp_path, env=environment, text=True)
    assert __version__ in said
    command = [binaries / "headway", "serve", "--host", "127.0.0.1", "--port", "0", "--threads", "1"]
    server = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r"Serving .* at (http\S+)/v1", line)))
        ask = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/chat/completions", json=ask, timeout=60).json()
        assert answer["model"] == "headway/story" and answer["usage"]["completion_tokens"] > 0
    finally:
        server.terminate()
        server.communicate(timeout=60)
