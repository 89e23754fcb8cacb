"""Replayed steps against eager ones."""

from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from tests.engine.runner.cuda_graphs.simulated_graphs import (
    BLOCKS,
    Run,
    tiny_model,
)

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.kernels import dispatch
from loraplex.engine.model_loading import LoadedModel
from loraplex.engine.runner.cuda_graphs import buckets
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKind, AdapterKinds, StaticGroups
from loraplex.engine.runner.cuda_graphs.buckets import StepShape

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask

DOCUMENTS = [(20, 21, 22, 23, first, *range(40, 40 + 2 * first), 60, 61) for first in (3, 4, 9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("graphs"), deterministic=False)


@pytest.fixture(scope="module")
def deterministic_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("deterministic"), deterministic=True)


@pytest.mark.parametrize(("seed", "overlap"), [(1, "off"), (2, "on")])
def test_every_replayed_step_equals_the_eager_one_to_the_bit(
    deterministic_model: LoadedModel,
    scripted_mask: "type[ScriptedMask]",
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    overlap: str,
) -> None:
    """Decodes, forced tokens and chunks, JSON rows and adapters, unknown tokens, and steps that are too large."""
    monkeypatch.setattr(buckets, "MIXED_TOKENS", (6, 10))
    run = Run(
        deterministic_model,
        graphs=True,
        overlap=overlap,
        deterministic=True,
        mask=lambda: scripted_mask(DOCUMENTS, fast_forward=True),
    )
    run.compare_steps()
    for tokens in (6, 7, 10, 11):  # each beside the edge of a bucket
        run.add(f"prompt of {tokens}", [tokens, *range(4, 3 + tokens)], None, max_tokens=2)
        while run.engine.has_unfinished:
            run.step()
    run.play(seed, grammars=(b"json",))
    replayed = {shape for shape in run.compared if shape is not None}
    mixed = {shape.tokens for shape in replayed if shape.chunks}
    assert mixed == {6, 10} and None in run.compared
    prompts = [shape and shape.tokens for shape in run.compared[:8:2]]
    assert prompts == [6, 10, 10, None]
    assert {shape.tokens for shape in replayed if not shape.chunks} >= {1, 2, 4}
    assert run.engine.stats().forced_tokens > 20
    assert set(run.kinds) == {AdapterKind.MANY}, "with `deterministic` there is one kind of adapters"
    assert sum(shape is not None for shape in run.compared) > 0.7 * len(run.compared)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("seed", [1, 2])
def test_replayed_steps_give_the_tokens_of_eager_ones(model: LoadedModel, seed: int, overlap: str) -> None:
    eager = Run(model, graphs=False).play(seed)
    replayed = Run(model, graphs=True, overlap=overlap).play(seed)
    assert replayed.outputs == eager.outputs
    assert replayed.graphs is not None and replayed.graphs.num_replayed == replayed.engine.stats().steps
    assert set(replayed.kinds) == {AdapterKind.FEW, AdapterKind.MANY}


def test_padding_writes_to_no_block_of_the_pool(model: LoadedModel) -> None:
    run = Run(model, graphs=True)
    cache = run.engine.runner._kv_cache
    for layer in cache:
        layer.fill_(7.0)
    for index in range(3):
        run.add(str(index), [5 + index, 9], None, max_tokens=4)
    while run.engine.has_unfinished:
        run.step()
    run.engine.close()
    touched = {block for layer in cache for block in range(BLOCKS + 1) if bool((layer[block] != 7.0).any())}
    assert BLOCKS in touched and len(touched) == 1 + 3 * 2
    assert all(bool((layer[BLOCKS][1:] == 7.0).all()) for layer in cache), "one slot takes it all"
    assert not run.kinds, "rows of the base alone pay for no adapter"


def test_without_adapters_only_base_steps_are_captured(model: LoadedModel) -> None:
    run = Run(model, graphs=True, few=0)
    run.add("base", [5, 6], None, max_tokens=5)
    run.add("adapted", [5, 6], "a", max_tokens=9)
    while run.engine.has_unfinished:
        run.step()
    run.engine.close()
    assert run.graphs is not None and not run.kinds
    assert len(run.outputs["adapted"]) == 9


def test_a_step_of_more_forced_tokens_than_rows_is_replayed(
    deterministic_model: LoadedModel, scripted_mask: "type[ScriptedMask]"
) -> None:
    """The rows of its graph are tokens. A step with more of them than its rows may decode at once is not captured."""
    documents = [[(20, *range(30, stop), last, 5) for last in (60, 61)] for stop in (36, 50)]
    masks = [scripted_mask(each, fast_forward=True) for each in documents]
    run = Run(deterministic_model, graphs=True, rows=2, deterministic=True, mask=iter(masks).__next__)
    run.compare_steps()
    for index in range(2):
        run.add(str(index), [5 + index, 9], None, b"json", max_tokens=40)
    while run.engine.has_unfinished:
        run.step()
    run.engine.close()
    assert all(tuple(run.outputs[str(index)]) in documents[index] for index in range(2))
    forced = [shape.tokens for shape in run.compared if shape and shape.samples and not shape.chunks]
    assert forced and max(forced) > 8 and None not in run.compared


@pytest.mark.parametrize(
    ("limits", "rows", "kinds"),
    [
        (AdapterKinds(0), 64, "BASE"),
        (AdapterKinds(8), 64, "BASE FEW MANY"),
        (AdapterKinds(8), 8, "BASE FEW"),
        (AdapterKinds(8, is_one=True), 4, "BASE MANY"),
    ],
)
def test_the_kinds_that_there_are(limits: AdapterKinds, rows: int, kinds: str) -> None:
    assert [kind.name for kind in limits.kinds(rows)] == kinds.split()
    if limits.few:
        found = {limits.of(adapters) for adapters in (0, 1, 8, 9, 64) if adapters <= rows}
        assert found == set(limits.kinds(rows))


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter has a process of its own")
def test_the_triton_backend_is_replayed_as_it_is_run(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of rows, table columns and lengths are read by the kernels themselves, from buffers full of poison."""
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.REFERENCE)
    eager = Run(model, graphs=False, rows=4).play(3, requests=4, adapters=("a", "bb"))
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
    grouping = StaticGroups(AdapterPath(), max_adapters=8)
    shapes = (StepShape(4, 4, 0, None), StepShape(24, 24, 4, 4))
    options: dict[str, Any] = {"overlap": "on", "few": 8, "rows": 4, "shapes": shapes}
    replayed = Run(model, graphs=True, grouping=grouping, **options).play(3, requests=4, adapters=("a", "bb"))
    assert replayed.outputs == eager.outputs
    assert replayed.graphs is not None and replayed.graphs.num_replayed > 5


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(f"{__file__}::test_the_triton_backend_is_replayed_as_it_is_run", seconds=12)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == 1
