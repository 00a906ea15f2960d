"""The sizes of what one rank holds under tensor and expert parallelism, and which degrees a model allows."""

import dataclasses

from qtrain.core.errors import UserError
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.grouped.token_permutation import EVEN_LOADS
from qtrain.models.config.model import ModelConfig
from qtrain.models.config.moe import MoEConfig
from qtrain.parallel.mesh import Mesh, divisors


def check_mesh(config: ModelConfig | MaybeNone, mesh: Mesh, sequence: bool, model: str) -> None:
    """UserError where a model, --model `model`, cannot be split over a mesh. sequence: along tokens too."""
    if mesh.tp > 1:
        check_divisible(config, mesh.tp, sequence)
    if mesh.ep > 1:
        check_experts_divisible(config, mesh.ep, model, mesh.tp)


def check_divisible(config: ModelConfig, ranks: int, sequence: bool = True) -> None:
    """UserError where `--tp ranks` does not divide what it must, or where layers cannot be split at all."""
    if config.moe is not None and not sequence:
        raise UserError("--no_sequence_parallel: ranks of --tp route their own tokens to experts; leave it out.")
    if config.mla is not None:
        raise UserError("--tp: a model with latent attention cannot be divided by tensor parallelism; leave it out.")
    sizes = {"attention heads": config.num_attention_heads, "key-value heads": config.num_key_value_heads}
    if len(config.moe_layers) < config.num_hidden_layers:
        sizes["intermediate size"] = config.intermediate_size
    if config.moe is not None:
        sizes["experts"] = config.moe.experts
    for what, size in sizes.items():
        if size % ranks:
            # Degrees that divide every size: the first message is the last.
            allowed = [d for d in range(1, 1025) if not any(each % d for each in sizes.values())]
            raise UserError(
                f"--tp: {ranks} does not divide the model's {what}, {size}; allowed: {', '.join(map(str, allowed))}."
            )
    if config.vocab_size < ranks:
        raise UserError(f"--tp: {ranks} ranks are more than the vocabulary's {config.vocab_size} tokens.")


def check_experts_divisible(config: ModelConfig | None, ranks: int, model: str, tp: int = 1) -> None:
    """UserError where `--ep ranks` does not divide the experts of --model that a rank of --tp has, or where there are
    none."""
    if config is None or not config.moe_layers:
        raise UserError(f"--ep: {ranks}, but {model} is not a mixture of experts; leave it out.")
    if (experts := config.mixture.experts // tp) % ranks:
        per_rank = f" on each rank of --tp {tp}" * (tp > 1)
        raise UserError(
            f"--ep: {ranks} does not divide the {experts} experts of {model}{per_rank}; allowed: {divisors(experts)}."
        )


def local_config(config: ModelConfig, tp: int, ep: int, every_routing: bool = True) -> ModelConfig:
    """The sizes of what one rank holds with --tp or --ep, its experts among them. every_routing: with --ep rows are
    those of any routing; without, those that a rank takes at least (`group_rows_of`)."""
    local = _local_experts(config, tp * ep, micro_batches=ep)
    if ep > 1 and not every_routing:
        # An even load: those of the tokens of `ep` micro-batches, over all ranks that compute them.
        rows = min(-(-EVEN_LOADS * config.mixture.per_token // tp), local.mixture.per_token)
        local = dataclasses.replace(local, moe=dataclasses.replace(local.mixture, reserved=rows))
    if tp == 1:
        return local
    return dataclasses.replace(
        local,
        vocab_size=-(-config.vocab_size // tp),  # the most that a rank has
        num_attention_heads=config.num_attention_heads // tp,
        num_key_value_heads=config.num_key_value_heads // tp,
        intermediate_size=config.intermediate_size // tp,
    )


def _local_experts(config: ModelConfig, ranks: int, micro_batches: int) -> ModelConfig:
    """With the experts of one of `ranks`, and the most routes to them that the tokens of its group's micro-batches can
    have, counted for each token of one."""
    if ranks == 1 or config.moe is None:
        return config
    own = config.moe.experts // ranks
    # A token has at most one route to an expert: no more of them than this rank has experts.
    per_token = micro_batches * min(config.moe.per_token, own)
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, experts=own, per_token=per_token))


def describe_rows(moe: MoEConfig, ranks: int, every_routing: bool) -> str:
    """The plan's line on the rows that --ep `ranks` reserves for a rank's experts."""
    most = ranks * min(moe.per_token, moe.experts // ranks) / moe.per_token
    if every_routing or most <= EVEN_LOADS:
        fix = f"; --no_cuda_graphs reserves {EVEN_LOADS}, and more when a step needs them" * (most > EVEN_LOADS)
        return f"rows    for every routing, {most:g} times an even load{fix}"
    return (
        f"rows    for {EVEN_LOADS} times an even load, which the plan counts; a step whose routing needs more takes "
        f"twice as many, and so on up to {most:g} times: nothing is dropped"
    )
