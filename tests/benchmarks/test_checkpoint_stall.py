"""The benchmark of checkpoints runs on a CPU, prints its table and leaves nothing behind."""

from benchmarks import checkpoint_stall
from tests.system import call, flags, write_model


def test_both_kinds_of_checkpoint_are_timed_and_deleted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "tiny.json")
    done = call(checkpoint_stall.main, flags(model=model, device="cpu", batch_size=2, seq_len=16, saves=1))
    assert done.code == 0, done.err
    header, _, row = [line.split("|")[1:-1] for line in done.out.splitlines() if line.startswith("|")]
    values = dict(zip([name.strip() for name in header], [value.strip() for value in row], strict=True))
    assert float(values["at once s"]) > 0 and float(values["stall s"]) > 0
    ratio = float(values["stall s"]) / float(values["at once s"])
    assert abs(float(values["of at once"].rstrip("%")) / 100 - ratio) < 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.json"]
