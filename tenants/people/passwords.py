"""Passwords: argon2id (RFC 9106), off the event loop and few at a time, since each takes 64 MiB.

Invariant: a comparison takes the same time with and without a stored hash.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import VerificationError

from loraplex.tenants.errors import InvalidField, SignInSlowed

MIN_LENGTH: Final = 12
MAX_LENGTH: Final = 256
AT_ONCE: Final = 2
MAX_WAITING: Final = 64

ResultT = TypeVar("ResultT")
_HASHER = PasswordHasher()
_waiting = 0


def check_password(password: str, email: str) -> str:
    """Return an allowed new password. Raises `InvalidField`."""
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise InvalidField("password", f"a password has {MIN_LENGTH} to {MAX_LENGTH} characters")
    if len(set(password)) < 5 or password.lower() in (email, email.partition("@")[0]):
        raise InvalidField("password", "this password is too easy to guess")
    return password


async def hash_password(password: str) -> str:
    """Return the hash with its salt and parameters. Raises `SignInSlowed` while too many wait."""
    return await _in_thread(lambda: _HASHER.hash(_encoded(password)))


async def password_matches(stored: str | None, password: str) -> bool:
    """Compare a password with the stored hash; None never matches, after the same work.

    Raises `SignInSlowed` while too many wait.
    """
    if len(password) > MAX_LENGTH:
        password = ""
    return await _in_thread(lambda: _verify(stored, password))


def _verify(stored: str | None, password: str) -> bool:
    unknown = _unknown_hash()
    try:
        return _HASHER.verify(stored or unknown, _encoded(password)) and stored is not None
    except VerificationError:
        return False


def _encoded(password: str) -> bytes:
    return password.encode("utf-8", "surrogatepass")


@cache
def _unknown_hash() -> str:
    """The hash that an account without a password is compared with."""
    return _HASHER.hash("an account without a password")


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, "passwords")


async def _in_thread(work: Callable[[], ResultT]) -> ResultT:
    global _waiting
    if _waiting >= MAX_WAITING:
        raise SignInSlowed(1)
    _waiting += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_executor(), work)
    finally:
        _waiting -= 1
