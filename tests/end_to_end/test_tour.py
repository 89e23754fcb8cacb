"""`loraplex tour` on the live demo: every claim holds, and nothing that it made is left."""

import httpx
from tests.end_to_end.live_server import LiveServer
from typer.testing import CliRunner

from loraplex.platform.cli.main import main
from loraplex.platform.drills.drill_tenant import TENANT_NAME


def belongings(demo: LiveServer) -> list[object]:
    """The keys in force, adapters, aliases and limits of the first tenant, and all tenants."""
    tenant = demo.access.tenants[0]
    found: list[object] = []
    for path in ("keys", "adapters", f"adapters/{tenant.adapters[0]}/aliases", "quotas"):
        headers = {"authorization": f"Bearer {tenant.admin_key}"}
        rows = httpx.get(f"{demo.url}/tenant/v1/{path}?limit=100", headers=headers).json()["data"]
        found.append(
            [(row.get("id"), row.get("name"), row.get("alias")) for row in rows if not row.get("revoked_at")]
        )
    headers = {"authorization": f"Bearer {demo.access.operator_key}"}
    rows = httpx.get(f"{demo.url}/operator/v1/tenants", headers=headers).json()["data"]
    found.append([row["name"] for row in rows])
    return found


def test_every_claim_holds_and_nothing_is_left(demo: LiveServer) -> None:
    before = belongings(demo)
    assert TENANT_NAME not in str(before)
    result = CliRunner().invoke(main, ["tour", "--data-dir", str(demo.data_dir)])
    print(f"\n{result.output}")
    assert result.exit_code == 0 and "9 of 9 claims held." in result.output
    assert belongings(demo) == before
