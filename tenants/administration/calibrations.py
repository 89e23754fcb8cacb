"""Use case on the decisions of a version: write the calibration of its probabilities.

Invariant: a calibration changes no version, so it may be written at any time, also for one that an alias points to.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy.dialects.postgresql import insert

from loraplex.tenants.errors import VersionStateChanged
from loraplex.tenants.models import DecisionCalibration
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.records import CalibrationDocument, decision_read
from loraplex.tenants.registry.versions import target_of
from loraplex.tenants.unit_of_work import UnitOfWork


async def calibrate(
    uow: UnitOfWork,
    tenant_id: UUID,
    name: str,
    version: int,
    *,
    system_fingerprint: str,
    format: str,
    temperatures: Mapping[str, float],
    report: Mapping[str, Any],
) -> CalibrationDocument:
    """Write the calibration of a version, in place of one for the same base model, wording and way to read. Values: as in `CalibrationDocument`.

    Raises `AdapterNotFound`, `VersionNotFound`, and `VersionStateChanged` for a version that was not validated.
    """
    record = await AdapterRepository(uow.session, tenant_id).version(name, version)
    if record.digest is None or record.state == "deleting":
        raise VersionStateChanged(f"version {version} of {name} is {record.state}: it cannot be calibrated")
    held = {
        "digest": record.digest,
        "system_fingerprint": system_fingerprint,
        "format": format,
        "read": decision_read(record.decision),
    }
    before = await uow.session.get(DecisionCalibration, (tenant_id, *held.values()))
    found = json.dumps({**held, "temperatures": temperatures}, sort_keys=True)
    sha256 = hashlib.sha256(found.encode()).hexdigest()
    changed = {
        "temperatures": temperatures,
        "report": report,
        "sha256": sha256,
        "created_at": datetime.now(UTC),
    }
    await uow.session.execute(
        insert(DecisionCalibration)
        .values(tenant_id=tenant_id, **held, **changed)
        .on_conflict_do_update(index_elements=["tenant_id", *held], set_=changed)
    )
    after = CalibrationDocument.model_validate(held | changed)
    await uow.audit.record(
        "version.calibrate",
        target_of(name, version),
        None if before is None else {"temperatures": before.temperatures, "sha256": before.sha256},
        {"temperatures": after.temperatures, "sha256": sha256, "format": format, "read": held["read"]},
        tenant_id=tenant_id,
    )
    return after
