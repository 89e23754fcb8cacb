"""What every table shares: naming of constraints, types of columns, and closed sets of values as checks."""

from datetime import datetime
from typing import Annotated, Any, ClassVar, TypeAlias

from sqlalchemy import BigInteger, DateTime, FetchedValue, LargeBinary, MetaData, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, mapped_column

NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


BigInt: TypeAlias = Annotated[int, mapped_column(BigInteger)]
"""A column of 64 bits: tokens, bytes, money, epochs."""

Revision: TypeAlias = Annotated[int, mapped_column(server_default="1", server_onupdate=FetchedValue())]
"""The number of changes of a row plus one, counted by a trigger; the row's ETag."""


class Base(DeclarativeBase):
    """Base of all tables, with one naming convention, so that migrations can name every constraint.

    Computed values (`revision`, times) are returned by the statement that writes the row.
    """

    __mapper_args__: Any = {"eager_defaults": True}  # noqa: RUF012 - the mapper reads it once
    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: DateTime(timezone=True),
        str: Text(),
        dict[str, Any]: JSONB(),
        list[dict[str, Any]]: JSONB(),
        list[str]: ARRAY(Text()),
        bytes: LargeBinary(),
    }


def one_of(column: str, values: tuple[str, ...]) -> str:
    """The condition that `column` is one of `values`."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"
