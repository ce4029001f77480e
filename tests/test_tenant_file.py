"""The file of tenants: what it says, what is wrong in it, and how `headway keys` changes it."""

from __future__ import annotations

import hashlib
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headway.config_files.classes import read_class_file
from headway.config_files.tenants import Access, key_digest, read_tenant_file
from headway.policy.admission.tenants import Limits, Tenant
from headway.policy.objectives.service_class import BUILT_IN
from tests.planner.command_line import CommandLine

DIGEST = hashlib.sha256(b"sk-night").hexdigest()
GOOD = f"""\
# who may come in
[total]
requests_per_minute = 1000

[[tenant]]
name = "acme"
weight = 2.5
requests_per_minute = 60
tokens_per_minute = 90_000

[[tenant]]
name = "lab"

[[key]]
tenant = "lab"
sha256 = "{DIGEST}"
default = "offline"
best = "batch"
# the end
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def headway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def test_what_a_file_says(file: Path) -> None:
    found = read_tenant_file(str(file))
    acme, lab = found.table
    assert acme == Tenant(name="acme", weight=2.5, requests_per_minute=60, tokens_per_minute=90_000)
    assert lab == Tenant(name="lab")
    assert found.table.total == Limits(requests_per_minute=1000)
    assert found.keys == {bytes.fromhex(DIGEST): Access("lab", "offline", "batch")}
    found.check_classes(BUILT_IN)


def test_a_key_with_models_and_scopes_survives_an_edit(file: Path) -> None:
    file.write_text(read_tenant_file(str(file)).with_key("k", Access("lab", models=("a", "b"), scopes=("embed",))).text)
    access = read_tenant_file(str(file)).keys[key_digest(b"k")]
    assert access.models == ("a", "b") and access.scopes == ("embed",)
    allowed = [path for path in ("/v1/completions", "/v1/embeddings", "/v1/models") if access.allows(path)]
    assert allowed == ["/v1/embeddings", "/v1/models"]
    assert not Access(models=("a",)).allows("/v1/batches") and Access().allows("/v1/batches")


def test_the_example_of_the_docs(file: Path) -> None:
    root = Path(__file__).parent.parent
    shown = (root / "docs" / "tenants.md").read_text().split("```toml\n")[1].split("```")[0]
    assert shown == (root / "examples" / "tenants.toml").read_text()
    file.write_text(shown)
    found = read_tenant_file(str(file))
    assert [each.name for each in found.table] == ["acme", "research"]
    assert found.keys == {key_digest(b"sk-example"): Access("research", "offline", "batch")}
    found.check_classes(BUILT_IN)
    found.check_classes(read_class_file(str(root / "examples" / "classes.toml")).table)


@pytest.mark.parametrize(
    ("written", "instead", "line", "says"),
    [
        (
            "requests_per_minute = 60",
            "requests_per_minute = 0",
            8,
            "requests_per_minute is 0; it must be a whole number",
        ),
        ("requests_per_minute = 60", "requests_per_minute = -1", 8, "from 1 to 100000000"),
        ("tokens_per_minute = 90_000", "tokens_per_minute = 1.5", 9, "tokens_per_minute is 1.5"),
        ("tokens_per_minute = 90_000", "tokens_per_minute = 1_000_000_000", 9, "it must be from 1 to 100000000"),
        ("tokens_per_minute = 90_000", "tokens_per_minute = nan", 9, "tokens_per_minute is nan"),
        (
            "tokens_per_minute = 90_000",
            "tokens_per_hour = 5",
            9,
            "'tokens_per_hour' is unknown; a tenant has requests_",
        ),
        ("requests_per_minute = 1000", "requests_per_minute = 0", 3, "requests_per_minute is 0"),
        ("requests_per_minute = 1000", "weight = 1", 3, "'weight' is unknown; the total has"),
        ("weight = 2.5", "weight = 0", 7, "weight is 0; it must be from 0.001 to 1000"),
        ("weight = 2.5", 'weight = "much"', 7, "weight is 'much'; it must be a number"),
        ('name = "lab"', 'name = "acme"', 12, "two tenants are named 'acme'"),
        ('name = "lab"', 'name = ""', 12, "a tenant's name is ''"),
        ('name = "lab"', 'name = "other"', 12, "name is 'other', which metrics already use"),
        ('name = "lab"', "name = 3", 12, "name is 3; it must be a string"),
        ('tenant = "lab"', 'tenant = "bal"', 15, "tenant is 'bal', which is not a tenant; there are acme, lab"),
        (DIGEST, "sk-night", 16, "a key has no sha256 of 64 hexadecimal digits; never write the key itself"),
        ('best = "batch"', "worst = 1", 18, "'worst' is unknown; a key has tenant, sha256, default, best"),
        ('best = "batch"', 'scopes = ["embed", "fly"]', 18, "scopes has 'fly'; choose of generate, embed, batches"),
        ('best = "batch"', 'models = "m"', 18, "models is 'm'; it must be a list of strings"),
        ('best = "batch"', "best = 1", 18, "best is 1; it must be a string"),
        ('best = "batch"', 'best = "night"', 18, "best is 'night', which is not a class; there are interactive, batch"),
        ('default = "offline"', 'default = "interactive"', 17, "default is 'interactive', more urgent than best"),
        ("# the end", f'[[key]]\nsha256 = "{DIGEST}"', 20, "two keys have this sha256; name each once"),
        ("[total]", "[sum]", 2, "'sum' is unknown; the file has total, tenant, key"),
        ("[total]", "[total", 2, "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    headway: CommandLine, file: Path, written: str, instead: str, line: int, says: str
) -> None:
    text = file.read_text()
    assert written in text
    file.write_text(text.replace(written, instead, 1))
    with pytest.raises(ValueError, match=r"tenants\.toml") as refused:
        read_tenant_file(str(file)).check_classes(BUILT_IN)
    assert says in str(refused.value) and f"line {line}" in str(refused.value)
    assert "sk-night" not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert headway("serve", "--tenants", file).error() == f"headway: --tenants: {refused.value}"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
        read_tenant_file(str(tmp_path / "none.toml"))


def test_keys_are_added_listed_and_revoked(headway: CommandLine, file: Path) -> None:
    file.chmod(0o600)
    added = headway("keys", "add", file, "acme", "--best", "batch", "--note", 'a "web" shop')
    key = added.out.strip()
    assert re.fullmatch(r"sk-hw-[\w-]{43}", key) and added.out.count("\n") == 1 and "SIGHUP" in added.err
    text = file.read_text()
    assert text.startswith(GOOD) and key not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    access = read_tenant_file(str(file)).keys[key_digest(key.encode())]
    assert (access.tenant, access.best, access.note) == ("acme", "batch", 'a "web" shop')
    listed = headway("keys", "list", file).out.splitlines()
    digits = key_digest(key.encode()).hex()[:12]
    assert listed[0].split() == ["KEY", "TENANT", "CREATED", "DEFAULT", "BEST", "MODELS", "SCOPES", "NOTE"]
    assert listed[1].split() == [DIGEST[:12], "lab", "offline", "batch"]
    assert listed[2].split()[:2] == [digits, "acme"] and listed[2].endswith('a "web" shop') and "batch" in listed[2]
    assert headway("keys", "revoke", file, DIGEST[:8]).code == 0
    assert headway("keys", "revoke", file, key).code == 0
    left = read_tenant_file(str(file))
    assert not left.keys and len(left.table.tenants) == 2
    assert file.read_text().startswith(GOOD.split("[[key]]")[0])


def test_a_comment_above_what_follows_a_revoked_key_stays(headway: CommandLine, file: Path) -> None:
    file.write_text(GOOD + "# the third\n[[tenant]]\nname = 'new'\n")
    assert headway("keys", "revoke", file, DIGEST).code == 0
    assert file.read_text().endswith("name = \"lab\"\n\n# the end\n# the third\n[[tenant]]\nname = 'new'\n")


def test_a_new_tenant_makes_the_file(headway: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    assert headway("keys", "add", path, "acme").error().endswith("; --new-tenant creates it and adds the tenant")
    assert headway("keys", "add", path, "acme", "--new-tenant").code == 0
    assert headway("keys", "add", path, "acme").code == 0
    assert len(read_tenant_file(str(path)).keys) == 2
    assert "has tenant 'acme' already" in headway("keys", "add", path, "acme", "--new-tenant").error()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("add", "FILE", "nobody"), "has no tenant 'nobody' (it has acme, lab); --new-tenant adds it"),
        (("revoke", "FILE", "ffffffff"), "0 keys of"),
        (("revoke", "FILE", DIGEST[:4]), "at least 6 digits"),
        (("list", "/no/such/file"), "cannot read /no/such/file"),
        (("add", "/no/such/file", "acme"), "there is no file /no/such/file; --new-tenant"),
        (("add", "/no/such/file", "acme", "--new-tenant"), "No such file"),
        (("rm", "FILE"), "headway keys has no command 'rm'; did you mean revoke?"),
        (("frobnicate", "FILE"), "headway keys has no command 'frobnicate'; it has add, list, revoke"),
    ],
)
def test_edits_that_cannot_be_made(headway: CommandLine, file: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in headway("keys", *(file if each == "FILE" else each for each in arguments)).error()
    assert file.read_text() == GOOD


def test_a_key_that_cannot_be_cut_out_is_left_to_a_hand(headway: CommandLine, file: Path) -> None:
    text = f'key = [{{sha256 = "{DIGEST}"}}, {{sha256 = "{"a" * 64}"}}]\n'
    file.write_text(text)
    assert "line 1: cannot remove this key" in headway("keys", "revoke", file, DIGEST).error()
    assert file.read_text() == text


def test_edits_at_the_same_time_lose_nothing(file: Path) -> None:
    command = [sys.executable, "-m", "headway", "keys", "add", str(file), "acme"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(6)]
    keys = [each.communicate(timeout=60)[0].strip() for each in running]
    assert {key_digest(key) for key in keys} <= read_tenant_file(str(file)).keys.keys()
    assert len(set(keys)) == 6
