"""What cannot come back from a machine is deleted, with the reason; what was there before stays."""

from pathlib import Path

from tests.benchmarks.gpu.outputs import Outputs


def test_what_cannot_come_back_is_dropped(tmp_path: Path) -> None:
    before = tmp_path / "an old file with spaces"
    before.touch()
    outputs = Outputs(tmp_path, max_files=3, max_mib=1.0)
    lines = tmp_path / "gpu.jsonl"
    names = ("trace.json.gz", "large.json", "a b.json", "1/2/3/deep.json", "1/2/fits.json", "fourth.json")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes((2 << 20) if name.startswith("large") else 10))
    lines.write_bytes(bytes(2 << 20))
    dropped = dict(outputs.drop_unfit(lines))
    assert dropped == {
        "large.json": "2.0 MiB, at most 1 come back",
        "a b.json": "names have letters, digits, '.', '_' and '-' and lie at most 2 folders deep",
        "1/2/3/deep.json": "names have letters, digits, '.', '_' and '-' and lie at most 2 folders deep",
        "fourth.json": "at most 3 files come back",
    }
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {before.name, "gpu.jsonl", "trace.json.gz", "1/2/fits.json"}
