"""y = silu(gate) * up, its gradient, and what quantizes both as they are computed.
Built on the kernels of quantize/."""
