"""Evaluations that a person starts in the console: their requests are those of a key of that person's own.

Invariant: the key may infer only, ends within `LIFETIME`, and is issued with its evaluation or not at all.
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from loraplex.tenants.errors import ScopeNotHeld
from loraplex.tenants.evaluations import use_cases as evaluations
from loraplex.tenants.evaluations.records import EvaluationDocument
from loraplex.tenants.evaluations.use_cases import NewEvaluation
from loraplex.tenants.people.console_keys import issue_console_key
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.scopes import ADAPTERS_WRITE, INFERENCE
from loraplex.tenants.unit_of_work import UnitOfWork

LIFETIME: Final = timedelta(days=7)
MAX_KEYS: Final = 1000
"""A key may still work for an evaluation, and ends with its time."""
PURPOSE: Final = "evaluation"


async def start(
    uow: UnitOfWork, session: ConsoleSession, name: str, new: NewEvaluation
) -> EvaluationDocument:
    """Queue `new`, with a key of the person in place of its `key_id`. Raises what starting one raises, and `ScopeNotHeld`."""
    if session.tenant_id is None or not {ADAPTERS_WRITE, INFERENCE} <= session.scopes:
        raise ScopeNotHeld(f"evaluating takes a role with the scopes `{ADAPTERS_WRITE}` and `{INFERENCE}`")
    ends = datetime.now(UTC) + LIFETIME
    issued = await issue_console_key(
        uow.session, session.tenant_id, PURPOSE, (INFERENCE,), session.email, ends, most=MAX_KEYS
    )
    uow.notify_of([session.tenant_id])
    return await evaluations.start(uow, session.tenant_id, name, replace(new, key_id=issued.record.key_id))
