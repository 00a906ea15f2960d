"""Data parallelism: DDP, ZeRO-1/2/3 (FSDP), HSDP; what a rank stores of masters, gradients and weights."""
