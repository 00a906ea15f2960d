"""Runs with --distill: the log, resumed runs, ranks, adapters, documents, compiled layers, the plan, and mistakes."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import llm_finetune
import llm_pretrain
from qtrain.train.log.metrics import read_metrics
from tests.data.corpora import write_jsonl, write_questions
from tests.processes import PRETRAIN, write_pretraining
from tests.system import call, contents, flags, losses, only_run, serving, write_model
from tests.train.test_schedule_runs import SETTINGS, equal, steps

QAT = {"quantize": "qat"}


def train(main, runs: str, **settings) -> Path:
    done = call(main, flags(**settings, runs_dir=runs))
    assert done.code == 0, done.err
    return only_run(Path(runs), main.__module__)


def pretrain(runs: str, **settings) -> Path:
    return train(llm_pretrain.main, runs, **{**SETTINGS, **settings})


def kl(folder: Path) -> list[float]:
    return [r["kl"] for r in read_metrics(folder / "metrics.jsonl") if "kl" in r]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with data, and with teachers: a model of the students' shape, and a wider one."""
    folder = tmp_path_factory.mktemp("distill")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_model(Path("tiny.json"), max_position_embeddings=512)
        write_model(Path("wide.json"), max_position_embeddings=512, hidden_size=48, num_hidden_layers=1)
        write_jsonl(Path("jsonl"))
        write_questions(Path("questions.jsonl"))
        for name in ("tiny", "wide"):
            found = pretrain(name, model=f"{name}.json", export=True, keep_ckpts=0, n_steps=20)
            (folder / f"{name}_hf").symlink_to(found / "hf")
    return folder


@pytest.fixture(autouse=True)
def here(trained, tmp_path, monkeypatch) -> None:
    for file in trained.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)


def test_the_log_has_cross_entropy_and_the_divergence_beside_it():
    """With weight 0 all is as without a teacher, bit for bit; with more the divergence falls further."""
    runs = {
        weight: pretrain(f"weight{weight}", distill={"teacher": "wide_hf", "weight": weight}, keep_ckpts=1, **QAT)
        for weight in (0, 0.9)
    }
    plain = pretrain("plain", keep_ckpts=1, **QAT)
    assert losses(runs[0]) == losses(plain) and not kl(plain)
    assert equal(runs[0] / "checkpoints" / "00000008", plain / "checkpoints" / "00000008")
    assert steps(runs[0.9])[0][1] == steps(plain)[0][1], "the first step's loss is cross-entropy"
    assert kl(runs[0.9])[0] == kl(runs[0])[0] > 0.1 and kl(runs[0.9])[-1] < kl(runs[0])[-1]
    text = (runs[0.9] / "train.log").read_text()
    assert "teacher wide_hf: 0.9 of the loss is KL(teacher || student) at temperature 1" in text


def test_micro_batches_add_up():
    found = [
        pretrain(f"of{size}", distill={"teacher": "tiny_hf"}, micro_batch_size=size, keep_ckpts=0) for size in (1, 4)
    ]
    assert kl(found[0]) == pytest.approx(kl(found[1]), rel=1e-3)
    assert [s[1] for s in steps(found[0])] == pytest.approx([s[1] for s in steps(found[1])], rel=1e-3)


@pytest.mark.parametrize("at", [2, 6])
def test_a_resumed_run_is_the_same(at):
    settings = {"distill": {"teacher": "wide_hf"}, "quantize_schedule": json.dumps([[0, "bf16"], [4, "qat"]])}
    whole = pretrain("whole", **settings)
    rest = pretrain("rest", **settings, resume=str(whole / "checkpoints" / f"{at:08d}"))
    assert steps(whole) == steps(rest) and kl(whole) == kl(rest)
    assert equal(whole / "checkpoints" / "00000008", rest / "checkpoints" / "00000008")


def test_a_teacher_that_changed_is_told_on_resume():
    shutil.copytree(Path("wide_hf").resolve(), "teacher", copy_function=shutil.copy)
    settings = {"distill": {"teacher": "teacher"}, "n_steps": 4}
    at = str(pretrain("first", **settings) / "checkpoints" / "00000002")
    said = f"--resume: the teacher of --distill is not the one of {at}: "
    assert said not in (pretrain("same", **settings, resume=at) / "train.log").read_text()
    weights = load_file("teacher/model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, "teacher/model.safetensors", {"format": "pt"})
    Path("teacher/checksums.json").unlink()
    text = (pretrain("changed", **settings, resume=at) / "train.log").read_text()
    assert f"{said}norm.weight differs, the loss changes with it" in text


@pytest.mark.parametrize("more", [{}, {"lora": {"r": 2}}, {"lora": {"r": 2}, "quantize": "int8"}])
def test_a_student_that_begins_as_its_teacher(more):
    """Documents packed together, and adapters: the teacher sees the same tokens with the same masks."""
    data = {"type": "instruct", "dataset": "questions.jsonl", "template": "gsm8k", "tokenizer": "byte"}
    settings = {**SETTINGS, "train_ds": data, "seq_len": 160, "model": "tiny_hf", "keep_ckpts": 1}
    found = train(llm_finetune.main, "runs", **{**settings, "distill": {"teacher": "tiny_hf"}, **more})
    first, last = kl(found)[0], kl(found)[-1]
    assert first < (1e-2 if "quantize" in more else 1e-6) < last
    assert not any("teacher" in name for name in contents(found / "checkpoints" / "00000008"))


def test_compiled_it_is_the_same():
    found = [pretrain(f"compile{c}", distill={"teacher": "wide_hf"}, compile=c, n_steps=3) for c in (False, True)]
    assert kl(found[0]) == pytest.approx(kl(found[1]), rel=1e-3)
    assert [s[1] for s in steps(found[0])] == pytest.approx([s[1] for s in steps(found[1])], rel=1e-4)


def test_ranks_train_as_one_process(tmp_path_factory, trained):
    folder = tmp_path_factory.mktemp("ranks")
    write_pretraining(folder)
    found = {}
    with serving(folder) as server:
        for ranks, more in ((1, {}), (2, {}), (2, {"reshard_after_forward": "always"})):
            runs = folder / f"of{ranks}{'sharded' * bool(more)}"
            settings = {**PRETRAIN, "distill": {"teacher": str(trained / "wide_hf")}, "deterministic": True, **more}
            done = server.run_ranks(ranks, "llm_pretrain", flags(**settings, runs_dir=runs))
            assert {outcome.code for outcome in done} == {0}, "\n".join(outcome.err for outcome in done)
            found[runs.name] = only_run(runs)
    one, *others = found.values()
    for other in others:
        assert steps(other) == steps(one) and kl(other) == pytest.approx(kl(one), rel=1e-6)


def test_the_plan_has_the_teachers_memory_and_work():
    plans = [
        call(llm_pretrain.main, flags(**{**SETTINGS, "device": "auto"}, gpu="h100", dry_run=True, **more))
        for more in ({}, {"distill": {"teacher": "wide_hf"}})
    ]
    assert [done.code for done in plans] == [0, 0], plans[1].err
    assert "teacher" not in plans[0].out and "teacher" in plans[1].out.split("of the shortest time")[1].split("\n")[0]


@pytest.mark.parametrize(
    ("teacher", "named"),
    [
        ("tiny.json", "--distill.teacher: tiny.json is a shape without weights; give a hub id or a folder"),
        ("nowhere/at/all", "--distill.teacher: there is no folder nowhere/at/all"),
        ("other_hf", "--distill.teacher: other_hf has a vocabulary of 300 tokens, and --model tiny.json of 258"),
    ],
)
def test_teachers_that_are_refused(teacher, named):
    Path("other_hf").mkdir()
    write_model(Path("other_hf/config.json"), vocab_size=300)
    done = call(llm_pretrain.main, flags(**SETTINGS, distill={"teacher": teacher}))
    assert done.code == 2 and named in done.err and not Path("runs").exists()
