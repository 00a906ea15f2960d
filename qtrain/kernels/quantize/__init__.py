"""bf16/fp32 -> low-bit codes and scales: `reference.py` defines, `operators.py` dispatches, one file per kind of
kernel. MX, NVFP4 and NF4 are whole in a file each, because their scales are not those of `numerics/formats.py`."""
