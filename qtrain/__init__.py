"""qtrain: train and fine-tune transformers with low-bit arithmetic."""

SCRIPTS = ("llm_pretrain", "llm_finetune", "timm_finetune", "tokenize_data", "benchmark_mm")

__version__ = "0.1.0"
