"""The Hugging Face Trainer with FP8 products: `python -m examples.hf_trainer`.

`qtrain.quantize` changes the model's linears; the Trainer needs to know nothing of it. On GPUs before Ada and Hopper,
and on a CPU, FP8 is emulated: slow, with the same numbers; take "int8" to be fast on an A100.
"""

import inspect
import tempfile
from pathlib import Path

import torch

from qtrain.core.process import prepare_process

prepare_process()  # before transformers: what a CPU torch beside torchvision needs

from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments  # noqa: E402

import qtrain  # noqa: E402

CONTEXT = 64


class Bytes(torch.utils.data.Dataset):
    """Windows of a text, a byte a token."""

    def __init__(self, text: str) -> None:
        data = torch.tensor(list(text.encode()))
        self.windows = data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main(steps: int = 30) -> list[float]:
    """Returns the losses that the Trainer logged, and loads what was saved."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config)
    print(qtrain.quantize(model, "fp8_rowwise"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=10,
            report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        optimizer = qtrain.optim.AdamW8bit(model, lr=3e-3)
        trainer = Trainer(
            model, arguments, train_dataset=Bytes(inspect.getsource(inspect)), optimizers=(optimizer, None)
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        qtrain.save_quantized(model, Path(folder) / "fp8", "ct_fp8_row")
        AutoModelForCausalLM.from_pretrained(Path(folder) / "fp8")
    return losses


if __name__ == "__main__":
    main()
