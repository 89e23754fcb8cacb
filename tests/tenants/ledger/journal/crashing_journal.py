"""A journal on a disk that loses what was not synced, beside a model of what it must contain."""

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.tenants.ledger.journal.crashing_disk import CrashingDisk
from tests.tenants.ledger.journal.model import JournalContent, JournalModel, content_of

from loraplex.tenants.errors import JournalFull, JournalUnavailable
from loraplex.tenants.ledger.journal.commits import Admit, End, JournalCommits, JournalRecorder, Write
from loraplex.tenants.ledger.journal.file import JournalConfig, JournalFile
from loraplex.tenants.ledger.journal.records import usage_text
from loraplex.tenants.quotas.reservation import NOTHING_USED

# So small that a few requests grow the file, empty its log and return pages. What a transaction writes beside its rows is not
# estimated: a log of a thousand pages has room for it, and a small one needs more than twice what it is emptied at.
CONFIG = JournalConfig(
    max_bytes=1 << 20,
    base_pages=32,
    growth_pages=4,
    checkpoint_pages=8,
    spare_pages=8,
    min_free_bytes=0,
)
Change = Callable[[JournalModel], object]


class CrashingJournal:
    """A journal on a crashing disk, beside the model of what it must contain."""

    def __init__(self) -> None:
        self.disk = CrashingDisk()
        self.model = JournalModel()
        self._folder = tempfile.TemporaryDirectory()

    @classmethod
    def started(cls) -> "CrashingJournal":
        journal = cls()
        journal.load()
        return journal

    def load(self) -> None:
        """Open the journal, as a process that starts."""
        path = Path(self._folder.name, "journal.sqlite")
        self.commits = JournalCommits(lambda: JournalFile(path, CONFIG, self.disk.connect), JournalRecorder())
        self.commits.load()

    def close(self) -> None:
        self.commits.close()
        self._folder.cleanup()

    def check(self) -> None:
        """What the journal returns is what the model has."""
        assert self._content() == self.model.content
        assert self.commits.position == self.model.position

    def crash(self, chance: random.Random) -> None:
        """End the process and the machine, and start both again."""
        self.disk.is_off = True
        self.commits.close()
        self.disk.reboot(chance)
        self.load()

    def write(self, *writes: Write, chance: random.Random | None = None) -> None:
        """Write together, and take over into the model what the answers and the journal say."""
        answers = self.commits.write(writes)
        done = [
            each for each, answer in zip(writes, answers, strict=True) if not isinstance(answer, Exception)
        ]
        failed = [answer for answer in answers if isinstance(answer, Exception)]
        if not failed:
            assert answers == self.model.write(writes)
        elif all(isinstance(error, JournalFull) for error in failed):
            assert [each for each in writes if isinstance(each, Admit)] == [
                each for each in writes if each not in done
            ]
            self.model.write(done)
        else:
            self._decide(chance, [each for each in writes if not isinstance(each, Admit)], done, writes)
        self._maintain(chance)

    def ship(self, position: int, chance: random.Random | None = None) -> None:
        self._call(lambda file: file.forget(position), lambda model: model.ship(position), chance)

    def reject(self, position: int, chance: random.Random | None = None) -> None:
        self._call(lambda file: file.reject(position, "bad"), lambda model: model.reject(position), chance)

    def _call(self, run: Callable[[JournalFile], None], change: Change, chance: random.Random | None) -> None:
        try:
            self.commits.call(run)
        except JournalUnavailable:
            self._settle([self.model, self.model.after(change)], chance)
        else:
            change(self.model)
        self._maintain(chance)

    def _maintain(self, chance: random.Random | None) -> None:
        self.commits.maintain(is_idle=True)
        self._crash_if_off(chance)

    def _decide(
        self,
        chance: random.Random | None,
        others: Sequence[Write],
        done: Sequence[Write],
        writes: Sequence[Write],
    ) -> None:
        """After a failure, the journal has the rows of every answer, and of the failed writes all or none."""
        admitted = [each.id for each in writes if isinstance(each, Admit)]

        def write(rows: Sequence[Write]) -> Change:
            return lambda model: model.write(rows)

        undone = [End(id, usage_text(NOTHING_USED)) for id in admitted]
        alternatives = [
            self.model.after(write(done)),
            self.model.after(write(others)),
            self.model.after(write(writes)),
            self.model.after(write(writes), write(undone)),
        ]
        # A machine that went off cancels nothing: its admissions are open, and nothing was computed for them.
        self._settle(alternatives if self.disk.is_off else [alternatives[n] for n in (0, 1, 3)], chance)

    def _settle(self, alternatives: list[JournalModel], chance: random.Random | None) -> None:
        assert self.disk.has_failed
        self.disk.has_failed = False
        content = self._content(chance)
        self.model = next(each for each in alternatives if each.content == content)

    def _content(self, chance: random.Random | None = None) -> JournalContent:
        """Read the journal, after a crash if the power is off."""
        self._crash_if_off(chance)
        try:
            return content_of(self.commits)
        except JournalUnavailable:
            assert self.disk.has_failed
            self._crash_if_off(chance)
            return content_of(self.commits)

    def _crash_if_off(self, chance: random.Random | None) -> None:
        if self.disk.is_off:
            self.crash(chance or random.Random(0))
