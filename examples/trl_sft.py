"""TRL's SFTTrainer with INT8 products, which TRL itself has not: `pip install trl`, `python -m examples.trl_sft`."""

import tempfile

import torch

from qtrain.core.process import prepare_process

prepare_process()  # before transformers: what a CPU torch beside torchvision needs

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

import qtrain  # noqa: E402


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and two special ones: nothing is downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {symbol: index for index, symbol in enumerate([*alphabet, "<pad>", "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def main(steps: int = 20) -> list[float]:
    """Returns the losses that the trainer logged."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config)
    print(qtrain.quantize(model, "int8"))
    sums = [(a, b) for a in range(10) for b in range(10)]
    examples = [{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a, b in sums]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=5,
            report_to=[], save_strategy="no", disable_tqdm=True, max_length=32,
            dataloader_pin_memory=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
        )  # fmt: skip
        optimizer = qtrain.optim.AdamW8bit(model, lr=3e-3)
        trainer = SFTTrainer(
            model, arguments, train_dataset=Dataset.from_list(examples), processing_class=tokenizer,
            optimizers=(optimizer, None),
        )  # fmt: skip
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
