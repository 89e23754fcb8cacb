"""UUIDs of version 7 sort by time."""

import time
from uuid import RFC_4122

from loraplex.tenants.ids import uuid7


def test_they_sort_by_time() -> None:
    made = []
    for _ in range(200):
        made.append(uuid7())
        time.sleep(1e-6)
    assert made == sorted(made) and len(set(made)) == 200


def test_the_form() -> None:
    made = uuid7()
    assert (made.version, made.variant) == (7, RFC_4122)
    assert abs((made.int >> 80) / 1000 - time.time()) < 60
