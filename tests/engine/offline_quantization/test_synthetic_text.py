"""A text the model writes itself."""

from loraplex.engine.model_loading import LoadedModel
from loraplex.engine.offline_quantization.synthetic_text import sample_text
from loraplex.platform.processes.progress import SILENT


def test_texts_have_their_length_and_differ(base: LoadedModel) -> None:
    texts = sample_text(base, 18, 24, seed=1, progress=SILENT)
    assert [len(ids) for ids in texts] == [24] * 18
    assert {ids[0] for ids in texts} == {2}
    assert len({tuple(ids) for ids in texts}) == 18


def test_the_same_seed_gives_the_same_text_and_another_does_not(base: LoadedModel) -> None:
    assert sample_text(base, 2, 16, seed=1, progress=SILENT) == sample_text(
        base, 2, 16, seed=1, progress=SILENT
    )
    assert sample_text(base, 2, 16, seed=1, progress=SILENT) != sample_text(
        base, 2, 16, seed=2, progress=SILENT
    )


def test_texts_of_two_seeds_share_none_whatever_their_numbers(base: LoadedModel) -> None:
    """The measured text must differ from the text that rounding was fitted to, which is twice as long."""
    fitted, measured = (
        sample_text(base, 8, 16, seed=1, progress=SILENT),
        sample_text(base, 4, 16, seed=2, progress=SILENT),
    )
    assert not {tuple(ids) for ids in fitted} & {tuple(ids) for ids in measured}
