"""The server secret of a start, compared with the one that sealed the database.

Invariant: a refused start leaves no new secret behind, and an accepted one voids what it cannot open before it serves.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from loraplex.platform.config import Settings
from loraplex.platform.server.secret import SECRET_FILE, derive, fingerprint, known_secret, server_secret
from loraplex.platform.startup_errors import SecretRefused
from loraplex.tenants.actors import system_actor
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.database import Database
from loraplex.tenants.errors import SecondFactorState, WebhookSecretUnreadable
from loraplex.tenants.installation import InstallationRepository, Voided, accept_secret
from loraplex.tenants.people.codes import SecondFactorSecrets
from loraplex.tenants.unit_of_work import unit_of_work
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets

GATEWAY_LIVE_S: Final = AdmissionConfig().gateway_live_s


async def recognized_secret(
    settings: Settings, database: Database, on_stage: Callable[[str], None], *, accept_new: bool
) -> bytes:
    """Return the secret; make it where the database knows none. `accept_new`: another one than it knows is accepted.

    Raises `SecretRefused`, and `SettingsError` for a secret that is too short.
    """
    configured = None if settings.secret is None else settings.secret.get_secret_value()
    given = known_secret(configured, settings.data_dir)
    async with unit_of_work(database, system_actor("serve"), None, None) as uow:
        installation = InstallationRepository(uow.session)
        known = await installation.fingerprint()
        is_lost = given is None and (known is not None or await installation.is_sealed())
        is_other = given is not None and not await _is_own(installation, known, given)
        if (is_lost or is_other) and not accept_new:
            raise SecretRefused(_refusal(settings, is_lost=is_lost))
        if (is_lost or is_other) and await installation.has_gateways(GATEWAY_LIVE_S):
            raise SecretRefused(
                "another gateway is live, and seals with the old secret: stop all gateways before `--accept-new-secret`;"
                f" one that was killed counts for {GATEWAY_LIVE_S:g} s"
            )
        secret = given or server_secret(configured, settings.data_dir)
        if is_lost or is_other:
            voided = await accept_secret(uow, fingerprint(secret))
        elif known is None:
            await installation.recognize(fingerprint(secret))
    if is_lost or is_other:
        on_stage(_report(voided))
    elif accept_new:
        on_stage("the server secret is the one that the database knows: nothing is voided")
    return secret


async def _is_own(installation: InstallationRepository, known: bytes | None, given: bytes) -> bool:
    """Whether the database knows the secret, or, as releases before left it without a fingerprint, was sealed by it."""
    if known is not None:
        return known == fingerprint(given)
    webhooks, second_factors = await installation.newest_sealed()
    derive_key = partial(derive, given)
    trials = (
        *(partial(WebhookSecrets(derive_key).decrypt, *each) for each in webhooks),
        *(partial(SecondFactorSecrets(derive_key).decrypt, *each) for each in second_factors),
    )
    return not trials or any(_opens(trial) for trial in trials)


def _opens(trial: Callable[[], str]) -> bool:
    try:
        trial()
    except (WebhookSecretUnreadable, SecondFactorState):
        return False
    return True


def _refusal(settings: Settings, *, is_lost: bool) -> str:
    where = "LORAPLEX_SECRET" if settings.secret is not None else str(settings.data_dir / SECRET_FILE)
    reason = (
        f"the server secret of this installation is missing: {where} does not exist"
        if is_lost
        else f"{where} has another server secret than the one that sealed this database"
    )
    return (
        f"{reason}; put the old one into LORAPLEX_SECRET or {settings.data_dir / SECRET_FILE}, or void what it sealed with "
        "`loraplex serve --accept-new-secret`"
    )


def _report(voided: Voided) -> str:
    return (
        f"the new server secret is accepted; voided: {voided.webhook_secrets} webhook secrets (rotate each), "
        f"{voided.second_factors} second factors (`loraplex user reset EMAIL --second-factor`), "
        f"{voided.recovery_codes} recovery codes, {voided.stored_responses} stored responses"
    )
