"""The signature against the official library of Standard Webhooks."""

import time

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from loraplex.tenants.webhooks.signature import new_secret, signed_headers

BODY = '{"type": "adapter.ready", "data": {"adapter": "süß"}}'.encode()


def test_a_receiver_verifies_with_either_secret_of_a_rotation() -> None:
    old, new, other = new_secret(), new_secret(), new_secret()
    headers = signed_headers([new, old], "event", int(time.time()), BODY)
    for secret in (old, new):
        assert Webhook(secret).verify(BODY, headers)["type"] == "adapter.ready"
    with pytest.raises(WebhookVerificationError):
        Webhook(other).verify(BODY, headers)
    for change in ({"webhook-id": "another"}, {"webhook-timestamp": str(int(time.time()) - 1)}):
        with pytest.raises(WebhookVerificationError):
            Webhook(new).verify(BODY, headers | change)
    with pytest.raises(WebhookVerificationError):
        Webhook(new).verify(BODY.replace(b"ready", b"heavy"), headers)


def test_secrets_differ_and_have_256_bits() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(len(Webhook(secret)._whsecret) == 32 for secret in secrets)
