"""Counters whose server's clock is set by a test."""

from datetime import datetime, timedelta
from hashlib import sha1
from typing import Final, get_args

from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.reply_decoding import EPOCH
from loraplex.tenants.counters.script_runner import Script, ScriptName, load_script

READS_CLOCK: Final = "redis.call('TIME')"


def set_server_clock(counters: Counters, moment: datetime) -> None:
    """Let all scripts read this time in place of the server's, until it is set again."""
    seconds, rest = divmod(moment - EPOCH, timedelta(seconds=1))
    time = f"{{ '{seconds}', '{rest // timedelta(microseconds=1)}' }}"
    for name in get_args(ScriptName):
        text = load_script(name).text
        assert text.count(READS_CLOCK) == 1
        text = text.replace(READS_CLOCK, time)
        counters._scripts[name] = Script(text, sha1(text.encode()).hexdigest())
