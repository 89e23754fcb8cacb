"""A text the model writes itself."""

from loraplex.engine.loading import LoadedModel
from loraplex.engine.release.own_text import sample_text


def test_texts_have_their_length_and_differ(base: LoadedModel) -> None:
    texts = sample_text(base, 18, 24, seed=1)
    assert [len(ids) for ids in texts] == [24] * 18
    assert {ids[0] for ids in texts} == {2}
    assert len({tuple(ids) for ids in texts}) == 18


def test_the_same_seed_gives_the_same_text_and_another_does_not(base: LoadedModel) -> None:
    assert sample_text(base, 2, 16, seed=1) == sample_text(base, 2, 16, seed=1)
    assert sample_text(base, 2, 16, seed=1) != sample_text(base, 2, 16, seed=2)
