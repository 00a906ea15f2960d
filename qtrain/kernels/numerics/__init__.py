"""What codes and scales are: formats, packing, rounding and its Philox bits, and the device functions of all kernels.
Knows none of the other folders."""
