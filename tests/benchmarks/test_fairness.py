"""The live benchmark of turns: what it sends, and what it says."""

from __future__ import annotations

import tomllib

from benchmarks.fairness import TENANTS, mix, table, tenant
from headway.tenant_file import Access, key_digest, parse_tenant_file


def test_the_flood_sends_so_many_times_as_much_by_its_own_key() -> None:
    quiet, flood = tomllib.loads(mix(3.0, 20))["class"]
    assert (quiet["request_rate"], flood["request_rate"]) == (3.0, 60.0)
    assert quiet["input_len"] == flood["input_len"]
    assert flood["cancel_share"] == 1 and "cancel_share" not in quiet
    (alone,) = tomllib.loads(mix(3.0, 0))["class"]
    assert alone == quiet
    file = parse_tenant_file("tenants.toml", "".join(map(tenant, TENANTS)))
    for each in (quiet, flood):
        key = each["headers"]["Authorization"].removeprefix("Bearer ")
        assert file.keys[key_digest(key.encode())] == Access(each["name"])


def test_the_table_has_a_row_for_each_run() -> None:
    row = {"policy": "slo, turns", "flooded": True, "ttft_p50_ms": 51.2, "ttft_p99_ms": 1234.5, "e2e_p99_ms": 2000}
    row |= {"failed": 0, "tokens_per_s": 7000.4, "lead": 3900, "bound": 9100}
    text = table({"runs": [row | {"flooded": False}, row]})
    assert "| slo, turns | alone | 51 |" in text
    assert "| slo, turns | beside the flood | 51 | 1,234 | 2,000 | 0 | 7,000 | 3,900 | 9,100 |" in text
