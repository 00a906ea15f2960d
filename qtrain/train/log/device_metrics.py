"""What a record of a step says of the device: `gpu`, `ms`, `joules_token`, `hours_billion`."""

import math
from typing import Any

import torch

from qtrain.comm.wire import all_gather_rows
from qtrain.core.gpu_sensors import GpuSensors
from qtrain.train.log.metrics import TOKENS, Rate, SampleUnit


def device_metrics(sensors: GpuSensors, now: dict[str, Any], rate: Rate | None, unit: SampleUnit) -> dict[str, Any]:
    """Keys of metrics.jsonl; those that are not known are left out.

    now: of `sensors`, read while the device worked. rate: of the steps since the last record, with the joules per token
    of all ranks; None: none of them counts, and power is what it is now."""
    found: dict[str, Any] = {}
    power = None if rate is None else rate.power
    power = sensors.power() if power is None else power
    if sensors.available:
        found["gpu"] = now | ({} if power is None else {"power": round(power, 1)})
    if rate is None:
        return found
    if rate.ms:
        found["ms"] = {kind: round(ms, 3) for kind, ms in rate.ms.items()}
    if unit is TOKENS:
        found["hours_billion"] = 1e9 / rate.tok_s / 3600  # wall time of 1e9 tokens at this rate
    if rate.joules_token is not None:
        found["joules_token"] = rate.joules_token
    return found


def joules_of_all(joules_token: float | None, device: torch.device) -> float | None:
    """The sum over all ranks, each of which has asked its own device; None where one does not know. A collective."""
    own = torch.tensor([math.nan if joules_token is None else joules_token], dtype=torch.float64, device=device)
    # The NaN of one rank makes the sum NaN, and so unknown on every rank.
    total = float(all_gather_rows(own).sum())
    return total if math.isfinite(total) else None
