"""Acceptance of another server secret: what the old one sealed is voided, and people and receivers set it up again."""

from dataclasses import asdict

from loraplex.tenants.installation import InstallationRepository, Voided
from loraplex.tenants.unit_of_work import UnitOfWork


async def accept_secret(uow: UnitOfWork, fingerprint: bytes) -> Voided:
    """Void what the secret before sealed, and recognize the secret of this fingerprint from now on."""
    installation = InstallationRepository(uow.session)
    before = await installation.fingerprint()
    voided = await installation.void_sealed()
    await installation.recognize(fingerprint)
    seen = None if before is None else {"fingerprint": before.hex()}
    after = {"fingerprint": fingerprint.hex(), **asdict(voided)}
    await uow.audit.record("installation.accept_secret", "installation", seen, after)
    return voided
