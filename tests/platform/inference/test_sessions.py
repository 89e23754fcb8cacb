"""Labels of sessions say nothing of their texts, differ by tenant and server, and fit the ledger and the counters."""

from functools import partial
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.inference.sessions import LABEL, chosen_session, session_label
from loraplex.platform.server.secret import derive
from loraplex.tenants.quotas.reservation import SESSION

OURS, THEIRS = UUID(int=1), UUID(int=2)
KEY = partial(derive, b"the secret of a server")


@given(st.text(st.characters(categories=None), max_size=300))
def test_any_text_has_a_label_that_fits(text: str) -> None:
    label = session_label(KEY, OURS, text)
    assert LABEL.fullmatch(label) and SESSION.fullmatch(label) and text not in (label, label[4:]) or not text
    assert session_label(KEY, OURS, text) == label == chosen_session(KEY, OURS, label)
    assert chosen_session(KEY, OURS, text) == label
    assert session_label(KEY, THEIRS, text) != label
    assert session_label(partial(derive, b"another secret"), OURS, text) != label


def test_a_label_is_stable_over_releases() -> None:
    assert session_label(KEY, OURS, "user_1_session_2") == "ses_91ba38f0fdaf7e1c5afab36dddf4636b"
