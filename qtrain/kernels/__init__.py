"""Tensors in, tensors out: each operation as a Triton kernel `_x_kernel`, its launcher `launch_x`, a custom op `x`, and
`x_ref` in plain PyTorch: the definition, the CPU path and the oracle of the tests. Nothing above imports Triton."""
