"""Joins the optimizer, which has the weights in registers when it writes them, and the quantizers of those weights."""

from qtrain.kernels.optim.update_rules import WeightAmax
from qtrain.optim import Optimizer
from qtrain.parallel.data_parallel import DataParallel
from qtrain.quant import LowBitLinear, QuantizedModel


def share_amax(optimizer: Optimizer, quantized: QuantizedModel, parallel: DataParallel) -> None:
    """From now on tensorwise scales of weights come from the absmax that the optimizer's step leaves, where it can."""

    def record(linear: LowBitLinear) -> WeightAmax | None:
        # That of a rank's rows is of use where ranks reduce it, which they do for codes.
        master = parallel.master(linear.weight)
        return optimizer.record_amax(master) if master is linear.weight or linear.codes_only else None

    quantized.use_optimizer_amax(record)
