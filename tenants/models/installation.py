"""What the database knows of its installation. Invariant: one row at most, and never the server secret itself."""

from datetime import datetime

from sqlalchemy import CheckConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.tables import Base


class Installation(Base):
    """`secret_fingerprint`: of the server secret that sealed what is stored here, known since `recognized_since`."""

    __tablename__ = "installation"
    __table_args__ = (
        CheckConstraint("is_only_row", name="is_only_row"),
        CheckConstraint("octet_length(secret_fingerprint) = 32", name="secret_fingerprint"),
    )

    is_only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    secret_fingerprint: Mapped[bytes]
    recognized_since: Mapped[datetime] = mapped_column(server_default=func.now())
