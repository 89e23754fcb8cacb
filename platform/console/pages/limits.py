"""`/console/limits`: limits and their use, narrower limits of keys and adapters, and why a request was limited.

Invariant: it works while a budget is used up, and while the counters or the engine do not answer.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, cast
from uuid import UUID

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.console.addresses import path_of, query_form
from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.console.forms import Entered, Form, FormInvalid, field_errors, parse, read_form
from loraplex.platform.errors import describe
from loraplex.platform.services import quotas
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.queries import limits, usage
from loraplex.platform.services.queries.limits import Crossed, EditedLimits, StoredLimits
from loraplex.platform.services.queries.usage import FilterChoices
from loraplex.platform.services.unit_of_work import UnitOfWork
