"""LoRA adapters and PEFT's format."""
