"""llm_finetune.py: which labels count, packing, a killed run, adapters from the command line, and mistakes."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import llm_finetune
from qtrain.data.batch import IGNORED, Batch
from qtrain.data.stream import StreamContext, open_stream
from qtrain.models import build_model, export_hf, read_model_source
from qtrain.train.eval.exact_match import WrittenQuestion, ask, final_answer
from qtrain.train.log.metrics import read_metrics
from qtrain.train.state.checkpoint import read_meta
from qtrain.train.step.forward import language_forward
from tests.cases import sampled
from tests.data.corpora import write_questions
from tests.system import call, contents, flags, last_step, losses, only_run, place, serving, tree, write_model

INSTRUCT = {"type": "instruct", "dataset": "questions.jsonl", "template": "gsm8k", "tokenizer": "byte"}
CHAT = {"type": "chat", "dataset": "questions.jsonl", "template": "chatml", "tokenizer": "byte", "window": 16}
GOOD = {"model": "tiny.json", "pretrained": False, "train_ds": INSTRUCT, "seq_len": 160, "n_steps": 2, "device": "cpu"}


def write_all(folder: Path) -> None:
    write_model(folder / "tiny.json", max_position_embeddings=512)
    write_questions(folder / "questions.jsonl")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path


def command(**settings) -> list[str]:
    return flags(**{k: v for k, v in {**GOOD, "batch_size": 2, **settings}.items() if v is not None})


# ---- what carries weight ---------------------------------------------------------------------------------------------


def loss_and_gradients(batches: list[Batch]) -> tuple[float, list[torch.Tensor]]:
    model = build_model(read_model_source("tiny.json"), seed=5)
    forward, total = language_forward(model, None), 0.0
    for batch in batches:
        sums = forward(batch)
        sums.loss.backward()
        total += sums.nll.item()
    return total, [p.grad.clone() for p in model.parameters()]


def all_samples(multiple: int) -> list:
    context, samples = StreamContext(160, epochs=1, seq_len_multiple=multiple), []
    stream = open_stream(INSTRUCT, context, "--train_ds")
    while True:
        try:
            samples.append(stream.next_sample())
        except StopIteration:
            return samples


def test_packed_equals_one_example_a_row_in_loss_and_gradients(here):
    packed, alone = all_samples(0), all_samples(40)
    assert len(packed) < len(alone) / 2
    loss, gradients = loss_and_gradients([Batch.of(packed)])
    loss_alone, gradients_alone = loss_and_gradients([Batch.of(alone)])
    assert loss == pytest.approx(loss_alone, rel=1e-5)
    for a, b in zip(gradients, gradients_alone, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_a_prompts_labels_do_not_count_and_the_end_tokens_does(here):
    batch = Batch.of(all_samples(0)[:2])
    loss, gradients = loss_and_gradients([batch])
    row, place_ = next((r, i) for r, i in (batch.labels == 257).nonzero().tolist())
    assert batch.labels[row, place_] == 257, "the end token is a label"
    without = batch.labels.clone()
    without[row, place_] = IGNORED
    assert loss_and_gradients([Batch(batch.input_ids, without, batch.doc_ids)])[0] < loss - 0.1
    with_prompt = batch.labels.clone()
    ignored = (batch.labels[0] == IGNORED).nonzero().flatten().tolist()
    assert len(ignored) > 20 and batch.input_ids[0, 0] == ord("Q") and 0 in ignored
    with_prompt[0, ignored] = -100  # whatever the token is: its label does not reach the loss
    same, same_gradients = loss_and_gradients([Batch(batch.input_ids, with_prompt, batch.doc_ids)])
    assert same == loss and all(torch.equal(a, b) for a, b in zip(gradients, same_gradients, strict=True))
    with_prompt[0, 0] = 7
    assert loss_and_gradients([Batch(batch.input_ids, with_prompt, batch.doc_ids)])[0] > loss + 0.1


def test_final_answers():
    found = {
        "It is 5.\n#### 1,234": "1234",
        "The answer is: $\\frac{1}{2}$": "\\frac{1}{2}",
        "so we get \\boxed{12}": "12",
        "4 and then 5.0 dollars.": "5",
        "The answer is 18.": "18",
        "no number": None,
    }
    assert {text: final_answer(text) for text in found} == found


def test_answers_come_back_in_the_order_of_the_questions(here):
    from qtrain.data.tokenizers.tokenizer import load_tokenizer

    model = build_model(read_model_source("tiny.json"), seed=5)
    tokenizer = load_tokenizer("byte", "--tokenizer")
    questions = [WrittenQuestion(t, tokenizer.encode(t), "1") for t in ("a long question", "b", "middle")]
    together = ask(model, tokenizer, questions, 6)
    assert together == [ask(model, tokenizer, [q], 6)[0] for q in questions]


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_from_a_folder_with_adapters_on_a_4_bit_base(here):
    """Evaluates, answers questions, saves an adapter that a second run continues, and exports the merged model."""
    source = read_model_source("tiny.json")
    export_hf(build_model(source, seed=1), source, Path("start"), _tokenizer())
    train_ds = {k: v for k, v in INSTRUCT.items() if k != "tokenizer"}
    settings = {"model": "start", "pretrained": True, "train_ds": {**train_ds, "part": "train"}, "n_steps": 30}
    settings |= {"eval_ds": {**train_ds, "part": "validation", "validation_fraction": 0.3}, "accuracy": 4}
    settings |= {"answer_tokens": 8, "lr": 0.01, "eval_interval": 0, "lora": {"r": 4, "base": "nf4"}}
    done = call(llm_finetune.main, command(**settings))
    assert done.code == 0, done.err
    run = only_run(Path("runs"), "llm_finetune")
    records = read_metrics(run / "metrics.jsonl")
    evaluations = [r for r in records if "eval_loss" in r]
    assert [r["step"] for r in evaluations] == [0, 30] and all(0 <= r["accuracy"] <= 1 for r in evaluations)
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"] - 0.2
    assert "[expected " in evaluations[0]["samples"][0][1]
    assert "examples    " in done.out and records[-2]["data"]["read"] > 0
    merged, start = load_file(run / "hf/model.safetensors"), load_file("start/model.safetensors")
    assert merged.keys() == start.keys()
    assert torch.equal(merged["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
    adapter = {"adapter": str(run / "adapter")}
    lora = {**adapter, "base": "nf4", "merge": "original"}
    again = call(llm_finetune.main, command(**{**settings, "lora": lora, "n_steps": 1}))
    assert again.code == 0, again.err
    (second,) = [p for p in Path("runs/llm_finetune").iterdir() if p.name != run.name]
    first = next(r for r in read_metrics(second / "metrics.jsonl") if "eval_loss" in r)
    assert first["eval_loss"] == pytest.approx(evaluations[1]["eval_loss"], abs=1e-5)
    name = "model.layers.1.self_attn.o_proj"
    a, b = (
        load_file(second / "adapter/adapter_model.safetensors")[f"base_model.model.{name}.lora_{x}.weight"]
        for x in "AB"
    )
    onto_original = load_file(second / "hf/model.safetensors")[f"{name}.weight"]
    assert torch.allclose(onto_original, start[f"{name}.weight"] + 16 / 4 * (b @ a), atol=1e-6)
    assert not torch.allclose(merged[f"{name}.weight"], onto_original, atol=1e-2)


def _tokenizer():
    from qtrain.data.tokenizers.tokenizer import load_tokenizer

    return load_tokenizer("byte", "--tokenizer")


def test_a_frozen_embedding_does_not_change(here):
    done = call(llm_finetune.main, command(freeze_embedding_layer=True, seq_len_multiple=40, weight_decay=0.1))
    assert done.code == 0 and "frozen: the embedding, which is the output head too" in done.out
    run = only_run(Path("runs"), "llm_finetune")
    trained = load_file(run / "hf/model.safetensors")
    start = build_model(read_model_source("tiny.json"), seed=42)
    assert torch.equal(trained["model.embed_tokens.weight"], start.embed_tokens.weight.detach())
    assert not torch.equal(
        trained["model.layers.0.mlp.down_proj.weight"], start.layers[0].mlp.down_proj.weight.detach()
    )


CASES = {
    "packed chats, in full": {"train_ds": CHAT, "quantize": "int8", "seq_len": 256},
    "padded, adapters with dropout on INT8": {
        "train_ds": {**INSTRUCT, "window": 16},
        "seq_len_multiple": 40,
        "micro_batch_size": 1,
        "lora": {"r": 2, "base": "int8", "dropout": 0.1},
    },
    "DoRA on NF4": {"train_ds": INSTRUCT, "lora": {"r": 2, "base": "nf4", "dora": True}},
    "a frozen embedding": {"train_ds": INSTRUCT, "freeze_embedding_layer": True},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_all(folder)
    with serving(folder) as server:
        yield server


@pytest.mark.parametrize(
    "case", sampled([*CASES], lambda case: case in ("DoRA on NF4", "a frozen embedding", "packed chats, in full"))
)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(server, tmp_path, case):
    settings = {**CASES[case], "n_steps": 20, "ckpt_interval": 7, "keep_ckpts": 9, "lr": 0.01, "eval_interval": 5}
    settings |= {"eval_ds": INSTRUCT, "eval_sequences": 4, "accuracy": 2, "answer_tokens": 4}
    whole = server.start("llm_finetune", command(**settings, runs_dir=tmp_path / "whole"))
    killed = server.start("llm_finetune", command(**settings, runs_dir=tmp_path / "killed"), hang_at=10)
    killed.until(lambda: last_step(tmp_path / "killed") == 10)
    assert killed.kill(signal.SIGKILL).code == -signal.SIGKILL
    run = only_run(tmp_path / "killed", "llm_finetune")
    resumed = server.start("llm_finetune", command(**settings, runs_dir=tmp_path / "killed", resume=run))
    assert resumed.wait().code == 0, resumed.errors.read_text()
    assert whole.wait().code == 0, whole.errors.read_text()
    other = only_run(tmp_path / "whole", "llm_finetune")
    assert losses(run) == losses(other) and len(losses(run)) == 25
    a, b = (contents(r / "checkpoints/00000020") for r in (run, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    states = [read_meta(r / "checkpoints/00000020")["state"] for r in (run, other)]
    assert place(states[0]) == place({**states[1], "run_id": states[0]["run_id"]})
    assert (run / "hf/model.safetensors").read_bytes() == (other / "hf/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("frozen", "held"),
    [({"lora": {"r": 2, "base": "nf4"}}, "lora_"), ({"freeze_embedding_layer": True}, "layers.|norm.")],
)
def test_a_checkpoint_holds_what_trains_and_does_not_resume_on_another_base(here, frozen, held):
    """Neither on other random weights nor on those of another folder."""
    source = read_model_source("tiny.json")
    for name, seed in (("start", 1), ("other", 2)):
        export_hf(build_model(source, seed=seed), source, Path(name), _tokenizer())
    for at, (model, others) in {
        "drawn": ({}, {"seed": 43}),
        "loaded": ({"model": "start", "pretrained": True}, {"model": "other"}),
    }.items():
        settings = {**frozen, **model, "runs_dir": at}
        assert call(llm_finetune.main, command(**settings)).code == 0
        run = only_run(Path(at), "llm_finetune")
        saved = [name for name in contents(run / "checkpoints/00000002") if name.startswith("model.")]
        assert saved and all(re.search(held, name) for name in saved), saved
        before = tree(run)
        done = call(llm_finetune.main, command(**{**settings, **others, "n_steps": 3, "resume": run}))
        assert done.code == 2 and done.err.count("\n") == 1 and "was saved on other frozen weights" in done.err
        assert tree(run) == before
        assert call(llm_finetune.main, command(**{**settings, "n_steps": 3, "resume": run})).code == 0
        assert load_file(run / "hf/model.safetensors").keys() == load_file("start/model.safetensors").keys()


# ---- mistakes --------------------------------------------------------------------------------------------------------

OWN = {"prompt": "Q: {question}", "answer": "{answer}"}
LETTERS = {**INSTRUCT, "template": {**OWN, "answer": "{letter}"}, "dataset": "letters.jsonl"}
NONE_HELD_OUT = {**INSTRUCT, "part": "validation", "validation_fraction": 0}
RUNNING_TEXT = {"type": "text", "paths": "text.txt", "tokenizer": "byte"}


def own(**changes) -> dict:
    return {"train_ds": {**INSTRUCT, "template": {**OWN, **changes}}}


def without(spec: dict, key: str) -> dict:
    return {"train_ds": {k: v for k, v in spec.items() if k != key}}


MISTAKES = [
    ("has no column 'query'", "Name one of these", {"train_ds": {**INSTRUCT, "template": "metamathqa"}}),
    ("has no column 'anser'", "Did you mean 'answer'?", own(answer="{anser}")),
    ("template: unknown template 'gsm8'", "Did you mean 'gsm8k'?", {"train_ds": {**INSTRUCT, "template": "gsm8"}}),
    ("the template is broken", "{{", own(prompt="{question")),
    ("only the name of a column", "__class__", own(prompt="{question.__class__}")),
    ("answer: it names no column", "", own(answer="yes")),
    ("template: the key 'answer' is missing", "", {"train_ds": {**INSTRUCT, "template": {"prompt": "x"}}}),
    ("unknown key 'promt'", "Did you mean 'prompt'?", own(promt="x")),
    ("holds a list, not text", "'messages'", own(answer="{messages}")),
    ("2 have nothing to learn", "none can be used", {"train_ds": {**INSTRUCT, "dataset": "empty.jsonl"}}),
    ("are longer than seq_len+1 = 9 tokens", "--seq_len", {"seq_len": 8}),
    ("none is in the part 'validation'", "", {"train_ds": NONE_HELD_OUT}),
    ("'nothing.jsonl' matches no file", "data_files", {"train_ds": {**INSTRUCT, "dataset": "nothing.jsonl"}}),
    ("cannot be read", "broken.jsonl", {"train_ds": {**INSTRUCT, "dataset": "broken.jsonl"}}),
    ("too_long: 'trim' is not allowed", "'drop', 'cut'", {"train_ds": {**INSTRUCT, "too_long": "trim"}}),
    ("has no tokenizer of its own", '"tokenizer"', without(INSTRUCT, "tokenizer")),
    ("the tokenizer 'byte' has no chat template", "chatml", without(CHAT, "template")),
    ("unknown chat template 'chatlm'", "Did you mean 'chatml'?", {"train_ds": {**CHAT, "template": "chatlm"}}),
    ("holds no list of messages", "'question'", {"train_ds": {**CHAT, "messages": "question"}}),
    ("no role or no text", "", {"train_ds": {**CHAT, "dataset": "roles.jsonl"}}),
    ("--seq_len_multiple: 48 does not divide --seq_len 160", "", {"seq_len_multiple": 48}),
    ("--accuracy: questions come from --eval_ds", "", {"accuracy": 3}),
    ("--accuracy: --eval_ds has no question whose answer", "", {"accuracy": 3, "eval_ds": LETTERS}),
    ("--accuracy: --eval_ds holds no prompts", "", {"accuracy": 3, "eval_ds": RUNNING_TEXT}),
    ("--lora: unknown key 'rank'", "", {"lora": {"rank": 8}}),
    ("--lora.r: 0 is out of range", "from 1 to 65536", {"lora": {"r": 0}}),
    ("--lora.r: 1000000000 is out of range", "from 1 to 65536", {"lora": {"r": 10**9}}),
    ("--lora.targets: unknown projection 'q_prj'", "Did you mean 'q_proj'?", {"lora": {"targets": ["q_prj"]}}),
    ("--lora.targets: unknown projection 'experts.up'", "", {"lora": {"targets": ["experts.up"]}}),
    ("'experts.down_proj' does not go with DoRA", "", {"lora": {"targets": "experts.down_proj", "dora": True}}),
    ("--lora.merge: 'original' adds adapters to", "--no_pretrained", {"lora": {"base": "nf4", "merge": "original"}}),
    ("--lora.base: 'int4' is not allowed", "'nf4'", {"lora": {"base": "int4"}}),
    ("both say how linears multiply", "leave one out", {"lora": {"base": "fp8"}, "quantize": "int8"}),
    ("'fp8_blockwise' does not multiply an NF4 base", "int8", {"lora": {"base": "nf4"}, "quantize": "fp8_blockwise"}),
    ("--lora.adapter: nowhere is no adapter", "adapter_config.json", {"lora": {"adapter": "nowhere"}}),
    ("is an adapter of another model", "has no place", {"lora": {"adapter": "other"}}),
    ("describes 'IA3', not a LoRA adapter", "", {"lora": {"adapter": "ia3"}}),
    ("--activation_checkpointing", "dropout", {"lora": {"dropout": 0.1}, "activation_checkpointing": "full"}),
    ("--lora.dropout: 0.1 does not go with DoRA", "set 0", {"lora": {"dora": True, "dropout": 0.1}}),
    ("--quantize: 'int8' does not go with DoRA", '"base"', {"lora": {"dora": True}, "quantize": "int8"}),
    ("--lora.r: 1000000000 is out of range", "65536", {"lora": {"r": 10**9}}),
    ("--lora.dora: 'yes' is not allowed", "", {"lora": {"dora": "yes"}}),
    ("--lora.targets: the list is empty", "", {"lora": {"targets": []}}),
    ("has the shape [2, 64]", "adapter of another model", {"lora": {"adapter": "wider"}}),
    ("cannot be read as safetensors", "", {"lora": {"adapter": "torn"}}),
    ("its bias is 'all', which is not supported", "", {"lora": {"adapter": "biased"}}),
    ("is a shape without weights", "", {"pretrained": True}),
    ("--lm_eval gsm8k needs the package 'lm_eval'", "pip install lm_eval", {"lm_eval": "gsm8k", "export": True}),
    ("--lm_eval: the value is empty", "leave --lm_eval out", {"lm_eval": "", "export": True}),
    ("--lm_eval: no task is given", "leave the flag out", {"lm_eval": " ,", "export": True}),
    ("--lm_eval: it evaluates the exported model", "--no_export", {"lm_eval": "gsm8k", "export": False}),
]  # fmt: skip


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    write_all(folder)
    (folder / "empty.jsonl").write_text('{"question": "a", "answer": ""}\n{"question": "b", "answer": " "}\n')
    (folder / "broken.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question"\n')
    (folder / "roles.jsonl").write_text(json.dumps({"messages": [{"content": "a"}]}) + "\n")
    (folder / "letters.jsonl").write_text('{"question": "a", "letter": "b"}\n')
    (folder / "text.txt").write_text("some text " * 100)
    for name, changes in (
        ("other", {}),
        ("ia3", {"peft_type": "IA3"}),
        ("biased", {"bias": "all"}),
        ("wider", {}),
        ("torn", {}),
    ):
        (folder / name).mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **changes}
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
        stray = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
        tensors = {stray: torch.zeros(2, 32)}
        if name == "wider":
            parts = {"lora_A": torch.zeros(2, 64), "lora_B": torch.zeros(64, 2)}
            place = "base_model.model.model.layers.{}.self_attn.q_proj.{}.weight"
            tensors = {place.format(layer, part): t.clone() for layer in range(2) for part, t in parts.items()}
        save_file(tensors, folder / name / "adapter_model.safetensors")
    (folder / "torn/adapter_model.safetensors").write_bytes(b"torn")
    return folder


@pytest.mark.parametrize(("says", "also", "settings"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_short_line_and_changes_nothing(broken, says, also, settings, monkeypatch):
    monkeypatch.chdir(broken)
    before = tree(broken)
    done = call(llm_finetune.main, command(**settings))
    message = done.err.removesuffix("\n")
    assert done.code == 2 and message.startswith("error: ") and "\n" not in message, done
    assert says in message and also in message and len(message) < 400, message
    assert tree(broken) == before


def test_the_command_lines_are_right_without_the_mistake(broken, monkeypatch):
    monkeypatch.chdir(broken)
    for settings in ({}, {"train_ds": CHAT, "seq_len": 256}, {"lora": {"base": "fp8"}}, {"seq_len_multiple": 32}):
        done = call(llm_finetune.main, command(**settings, dry_run=True))
        assert done.code == 0 and re.search(r"^memory ", done.out, re.MULTILINE), done.err
