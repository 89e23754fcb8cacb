"""An OpenID Connect provider in this process whose answers a test chooses."""

import base64
import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from joserfc import jwt
from joserfc.jwk import RSAKey

ISSUER, CLIENT, SECRET = "https://id.example.com", "loraplex", "a secret of the client"
CALLBACK = "https://llm.example.com/console/oidc/callback"
KEY = RSAKey.generate_key(2048, {"kid": "1"})
OTHER_KEY = RSAKey.generate_key(2048, {"kid": "1"})


@dataclass
class SmallProvider:
    """`metadata`, `claims`: what differs from a proper answer; None removes a field. `header`: of the ID token."""

    metadata: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    userinfo: dict[str, Any] = field(default_factory=dict)
    key: Any = field(default_factory=lambda: KEY)
    algorithm: str = "RS256"
    callback: str = CALLBACK
    nonce: str = ""
    challenge: str = ""
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def transport(self) -> httpx2.AsyncBaseTransport:
        return httpx2.MockTransport(self.answer)

    def authorize(self, address: str) -> dict[str, str]:
        """Sign the person in; return the query with which the browser goes back."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
        assert query["redirect_uri"] == self.callback and query["client_id"] == CLIENT
        assert (query["response_type"], query["code_challenge_method"]) == ("code", "S256")
        assert "openid" in query["scope"].split()
        self.nonce, self.challenge = query["nonce"], query["code_challenge"]
        return {"code": "the code", "state": query["state"], "iss": ISSUER}

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if path in self.statuses:
            return httpx2.Response(self.statuses[path], json={"error": "server_error"})
        return httpx2.Response(
            200, json=getattr(self, f"_{path.rpartition('/')[2].replace('-', '_')}")(request)
        )

    def _openid_configuration(self, _: httpx2.Request) -> Any:
        return _without_none(
            {
                "issuer": ISSUER,
                "authorization_endpoint": f"{ISSUER}/authorize",
                "token_endpoint": f"{ISSUER}/token",
                "jwks_uri": f"{ISSUER}/jwks",
                "userinfo_endpoint": f"{ISSUER}/userinfo",
                "authorization_response_iss_parameter_supported": True,
            }
            | self.metadata
        )

    def _jwks(self, _: httpx2.Request) -> Any:
        return {"keys": [KEY.as_dict(private=False)]}

    def _token(self, request: httpx2.Request) -> Any:
        sent = {name: values[0] for name, values in parse_qs(request.content.decode()).items()}
        assert sent["code"] == "the code" and sent["redirect_uri"] == self.callback
        digest = hashlib.sha256(sent["code_verifier"].encode()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == self.challenge
        assert request.headers["authorization"].startswith("Basic ")
        now = int(datetime.now(UTC).timestamp())
        claims = {
            "iss": ISSUER,
            "sub": "subject-1",
            "aud": CLIENT,
            "iat": now,
            "exp": now + 300,
            "nonce": self.nonce,
            "email": "Mara@example.com",
            "email_verified": True,
            "name": "Mara",
        } | self.claims
        header = {"alg": self.algorithm, "kid": "1"}
        token = jwt.encode(header, _without_none(claims), self.key, algorithms=[self.algorithm])
        return {"access_token": "an access token", "token_type": "Bearer", "id_token": token}

    def _userinfo(self, request: httpx2.Request) -> Any:
        assert request.headers["authorization"] == "Bearer an access token"
        return self.userinfo


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
