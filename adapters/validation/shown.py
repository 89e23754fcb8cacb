"""`shown`: a tenant's value in an error message, as JSON of at most 80 characters."""

import json


def shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
