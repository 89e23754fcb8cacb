"""`RequestChoices`: the sequences of one request. Invariant: siblings of the first wait until its prompt is computed."""

from dataclasses import dataclass

from loraplex.engine.batch.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class RequestChoices:
    """`siblings` are not queued yet; `admitted` is set once any choice has run."""

    sequences: list[Sequence]
    siblings: list[Sequence]
    admitted: bool = False

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.status is not SequenceStatus.FINISHED]

    def take_siblings(self) -> list[Sequence]:
        """The siblings that have not ended, which from now on queue like any other."""
        siblings, self.siblings = self.siblings, []
        return [s for s in siblings if s.status is not SequenceStatus.FINISHED]
