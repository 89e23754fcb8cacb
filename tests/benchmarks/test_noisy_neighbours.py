"""The hostile schemas never repeat, so that no cache takes the load off the server."""

import json
from itertools import islice

from tests.benchmarks.noisy_neighbours import endless_hostile_schemas, hostile_schemas


def test_no_two_hostile_requests_are_equal() -> None:
    drawn = list(islice(endless_hostile_schemas(), 2 * len(hostile_schemas())))
    assert {name for name, _ in drawn} == set(hostile_schemas())
    assert len({json.dumps(schema) for _, schema in drawn}) == len(drawn)
