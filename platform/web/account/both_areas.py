"""Pages that the tenant area and the operator area have both."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

from loraplex.platform.web.console.endpoint import FIRST_PAGE


class BothAreas(APIRouter):
    """Adds each route twice: below the first page of either area."""

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        for first in FIRST_PAGE.values():
            super().add_api_route(f"{first}{path}", endpoint, **options)
