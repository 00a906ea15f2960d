"""What of a model trains, and the plan of a run in which not everything does."""

import dataclasses

from torch import nn

from qtrain.train.plan import Plan
from qtrain.train.status import short_number


def freeze_embedding(model: nn.Module) -> list[str]:
    """Freeze the embedding; returns the names of the parameters, each with why where it is more than one module's."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    for embedding in embeddings:
        embedding.weight.requires_grad_(False)
    frozen = {id(e.weight) for e in embeddings}
    head = getattr(model, "lm_head", None)
    tied = head is not None and id(getattr(head, "weight", None)) in frozen
    return [f"frozen: the embedding{', which is the output head too' if tied else ''}"] if embeddings else []


def trained_parameters(model: nn.Module) -> tuple[int, int]:
    """(parameters that train, all of them)."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


def describe_trained(model: nn.Module) -> str:
    trained, whole = trained_parameters(model)
    return f"trained: {short_number(trained)} of {short_number(whole)} parameters ({100 * trained / whole:.3g}%)"


def adapter_plan(plan: Plan) -> Plan:
    """The plan of a run whose blocks and head are frozen: a frozen weight has two of the three products, and neither
    gradient nor optimizer state. The adapters' own are left out: they are a hundredth."""
    work = {kind: value * (1 if kind == "attention" else 2 / 3) for kind, value in plan.flops.items()}
    seconds = {kind: value * (1 if kind == "attention" else 2 / 3) for kind, value in plan.seconds.items()}
    memory = {kind: size for kind, size in plan.memory.items() if kind not in ("gradients", "optimizer")}
    return dataclasses.replace(plan, flops=work, seconds=seconds, memory=memory)
