"""The live benchmark of turns: what it sends, and what it says."""

from __future__ import annotations

import tomllib

from benchmarks.fairness import TENANTS, mix, table, tenant
from headway.config_files.tenants import Access, key_digest, parse_tenant_file


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


def test_the_table_has_the_medians_of_the_rounds_and_the_spread_of_their_ratios() -> None:
    row = {"policy": "slo, turns", "flooded": True, "ttft_p50_ms": 51.2, "ttft_p99_ms": 1200, "e2e_p99_ms": 2000}
    row |= {"in_time": 0.98, "failed": 0, "tokens_per_s": 7000.4, "lead": 3900, "bound": 9100}
    alone = [row | {"flooded": False, "ttft_p99_ms": each} for each in (400, 600, 800)]
    text = table({"runs": [*alone, row, row, row]})
    assert "| slo, turns | alone | 51 | 600 | 98 |" in text
    assert (
        "| slo, turns | beside the flood | 51 | 1,200 | 98 | 2,000 | 0 | 7,000 | 3,900 | 9,100 | 2.00 (1.50..3.00) |"
        in text
    )
