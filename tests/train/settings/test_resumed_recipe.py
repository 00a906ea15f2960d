"""The recipe that --resume takes from a run."""

import pytest

from qtrain.train.settings.resumed_recipe import with_recipe_of_run


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "lr=1" / "llm_pretrain" / "20260101-000000_it"
    (run / "checkpoints" / "00000008").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    return run


@pytest.mark.parametrize("named", ["", "checkpoints/00000008"])
@pytest.mark.parametrize("joined", [False, True])
def test_a_run_and_a_checkpoint_of_it_have_one(run, named, joined):
    path = str(run / named)
    argv = [f"--resume={path}"] if joined else ["--resume", path]
    for flags in ([], ["--n_steps", "9"], ["--lr=0.1", "--no_export"]):
        for given in ([*flags, *argv], [*argv, *flags]):
            assert with_recipe_of_run(given, "llm_pretrain") == ["--config", str(run / "config.json"), *given]


def test_what_has_none_is_left_to_the_messages_of_the_flags(run):
    for argv in (
        ["--resume", str(run), "--config", "own.json"],
        [f"--resume={run}", "--config=own.json", "--n_steps", "9"],
        ["--model", "quickstart", "--resume", str(run)],  # a whole command, whose other flags are at their defaults
        ["--resume", str(run), "--train_ds={}"],
        ["--resume", str(run), "--resume", str(run)],
        ["--resume", str(run / "elsewhere")],
        ["--resume", "auto"],
        ["--resume"],
        [],
    ):
        assert with_recipe_of_run(argv, "llm_pretrain") == argv
    argv = ["--resume", str(run)]
    assert with_recipe_of_run(argv, "llm_finetune") == argv
    (run / "config.json").unlink()
    assert with_recipe_of_run(argv, "llm_pretrain") == argv
