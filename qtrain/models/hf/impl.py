"""`--model_impl hf`: any causal language model of transformers behind the interface of the native decoder.

Two properties of a model are not in its config, so they are tested with a few tokens: whether its logits are its head
applied to its last hidden state (then the loss is computed through the head in chunks, else from whole logits), and
whether its attention keeps documents apart when positions restart.
"""

import contextlib
import copy
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.core.errors import UserError, unknown_name
from qtrain.core.hub import reaching_hub
from qtrain.models.hf.io import refuse_nonfinite, refuse_tensors, weight_map, weights_folder
from qtrain.models.hf.source import FIX, ModelSource
from qtrain.models.native.loss import LossSums, cross_entropy_sums, linear_cross_entropy
from qtrain.models.native.recompute import SETS, Kinds, block_contexts, selective_contexts
from qtrain.models.native.rope import document_positions
from qtrain.quant.export import exported_tensors

POSITION_TABLES = ("wpe", "embed_positions", "position_embedding", "pos_embed")
"""What transformers calls tables of positions."""


class HfModel(nn.Module):
    """A transformers model with the native decoder's interface. `layers` and `lm_head` are the model's own modules."""

    fullgraph = False  # its layers may have graph breaks

    model: Any
    """A PreTrainedModel of transformers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.loss_chunks = 0
        self.z_loss = 0.0
        self._recompute: Kinds = SETS["none"]
        self._plain_head: bool | None = None
        self._keeps_documents: bool | None = None

    @property
    def max_positions(self) -> int | None:
        """The longest text that the model can read: the rows of its table of positions, learned or fixed, as of GPT-2,
        OPT and GPT-J; None where positions are computed, as rotary ones are."""
        named = getattr(self.model.config, "max_position_embeddings", None)
        if not isinstance(named, int):
            return None
        tensors = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        rows = (len(t) for name, t in tensors if t.ndim > 1 and any(word in name for word in POSITION_TABLES))
        return named if any(named <= n <= named + 8 for n in rows) else None  # OPT's has two rows more

    @property
    def layers(self) -> nn.ModuleList:
        """The repeated layers: the longest list of modules of one type."""
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len({type(x) for x in m}) == 1]
        if not lists:
            raise UserError(f"--model_impl hf: {type(self.model).__name__} has no list of layers to compile.")
        return max(lists, key=len)

    @property
    def lm_head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @lm_head.setter
    def lm_head(self, head: nn.Module) -> None:
        self.model.set_output_embeddings(head)

    def set_recompute(self, kinds: Kinds) -> None:
        """kinds: one of `SETS`; a layer of transformers recomputes as a whole."""
        assert kinds in SETS.values(), f"{kinds}: a set that --activation_checkpointing names"
        if self._recompute:
            self.model.gradient_checkpointing_disable()
        self._recompute = kinds
        if not kinds:
            return
        if not self.model.supports_gradient_checkpointing:
            raise UserError(f"--activation_checkpointing: {type(self.model).__name__} supports 'none' only.")
        contexts = block_contexts if "block" in kinds else selective_contexts
        options: dict[str, Any] = {"use_reentrant": False, "context_fn": contexts}
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    def save_pretrained(self, folder: Path, max_shard_size: int) -> None:
        """Write safetensors, config.json and generation_config.json through transformers."""
        values = {name: make() for name, make in exported_tensors(self.model).items()}
        self.model.save_pretrained(folder, state_dict=values, max_shard_size=max_shard_size)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, doc_ids: Tensor | None = None
    ) -> Tensor | LossSums:
        """As `Decoder.forward`. Raises UserError for doc_ids if the model does not keep documents apart."""
        options: dict[str, Any] = {"use_cache": False}
        if doc_ids is not None:
            self.check_documents()
            options["position_ids"] = document_positions(doc_ids)
        if labels is None:
            return self.model(input_ids=input_ids, **options).logits
        if self._plain_head is None:
            self._plain_head = self._has_plain_head()
        if self._plain_head:
            hidden = self.model.base_model(input_ids=input_ids, **options)[0]
            return linear_cross_entropy(
                hidden.flatten(0, 1), self.lm_head, labels.flatten(), self.loss_chunks, self.z_loss
            )
        logits = self.model(input_ids=input_ids, **options).logits
        return cross_entropy_sums(logits.flatten(0, 1), labels.flatten(), self.z_loss)

    def check_documents(self) -> None:
        """UserError if the model does not keep documents apart. To be asked before it is quantized: a scale may cover
        the tokens of several."""
        if self._keeps_documents is None:
            self._keeps_documents = self._separates_documents()
        if not self._keeps_documents:
            raise UserError(
                f"--doc_mask: {type(self.model).__name__} does not keep documents apart in its attention. "
                "Use --no_doc_mask, or --model_impl native where the architecture is covered."
            )

    def _probe_ids(self) -> Tensor:
        # Eight tokens: two documents of four.
        device = self.model.get_input_embeddings().weight.device
        return torch.arange(1, 9, device=device).remainder(self.model.config.vocab_size).unsqueeze(0)

    @torch.no_grad()
    def _has_plain_head(self) -> bool:
        """Whether the model's logits are its head applied to its last hidden state."""
        if self.lm_head is None:
            return False
        ids = self._probe_ids()
        # Eager: a probe of eight tokens would compile every layer for a shape that is never seen again.
        with _evaluating(self.model), torch.compiler.set_stance("force_eager"):
            logits = self.model(input_ids=ids, use_cache=False).logits
            hidden = self.model.base_model(input_ids=ids, use_cache=False)[0]
            width = getattr(self.lm_head, "in_features", hidden.shape[-1])
            return hidden.shape[-1] == width and torch.equal(logits, self.lm_head(hidden))

    @torch.no_grad()
    def _separates_documents(self) -> bool:
        """Whether a second document's logits are independent of the first document, and those of the document alone."""
        ids = self._probe_ids()
        other = torch.cat((ids[:, 4:], ids[:, 4:]), dim=1)
        positions = document_positions(torch.tensor([[0] * 4 + [1] * 4], device=ids.device))
        with _evaluating(self.model), torch.compiler.set_stance("force_eager"):
            try:
                behind, behind_other = (
                    self.model(input_ids=x, position_ids=positions, use_cache=False).logits[:, 4:] for x in (ids, other)
                )
            except TypeError:  # no position_ids
                return False
            together, with_other = (self.model(input_ids=x, use_cache=False).logits[:, 4:] for x in (ids, other))
            alone = self.model(input_ids=ids[:, 4:], use_cache=False).logits
        # Not the same bits: the rows of an expert are multiplied together. Far less than as one document, though.
        change, as_one = ((x - y).float().norm() for x, y in ((behind, behind_other), (together, with_other)))
        tolerance = 0.02 * alone.float().abs().max().item()
        return bool(change <= 0.25 * as_one) and torch.allclose(behind, alone, atol=tolerance, rtol=0.0)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; the previous mode is restored on exit."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def build_hf_model(
    source: ModelSource, device: torch.device | str, dtype: torch.dtype, pretrained: bool, seed: int
) -> HfModel:
    """Build from the config with weights initialized from `seed` as transformers does, or load the source's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = copy.deepcopy(source.config)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise unknown_name(source.where, "model_type", str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers checks configs with errors of many types
        raise UserError(f"{source.where}: transformers refuses this config: {' '.join(str(error).split())}") from None
    if pretrained:
        place, where = source.folder or source.hub_id, f"--pretrained ({source.name})"
        if source.folder is not None:
            for index in weights_folder(source).glob("*.index.json"):
                weight_map(index, where)
        with reaching_hub("--model", f"the checkpoint of {source.name!r}", FIX), _explained(source, "weights"):
            model, loaded = AutoModelForCausalLM.from_pretrained(
                place, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
        _check_loaded(loaded, where)
        model = model.to(device)
        for name, parameter in model.named_parameters():
            refuse_nonfinite(where, name, parameter)
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.untyped_storage().resizable():  # mapped from the file: full sharding frees it
                tensor.data = tensor.data.clone()
    else:
        devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
        # transformers draws from the global generators, which the run goes on to use as if nothing had been drawn.
        with torch.random.fork_rng(devices=devices), torch.device(device), _explained(source, "config"):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.train()
    return HfModel(model)


def _check_loaded(info: dict[str, Any], where: str) -> None:
    """UserError for tensors that transformers would draw at random, because the files lack them or have them in another
    shape; a line for those that it leaves out."""
    refuse_tensors(where, "lacks the tensors", info["missing_keys"])
    shapes = [f"{name} {list(found)} (expected {list(wanted)})" for name, found, wanted in info["mismatched_keys"]]
    refuse_tensors(where, "has tensors of another shape than its config says", shapes)
    if unused := sorted(info["unexpected_keys"]):
        print(f"{where}: {len(unused)} tensors are not used, first {unused[0]}")


@contextlib.contextmanager
def _explained(source: ModelSource, what: str) -> Iterator[None]:
    """Errors of any type with which transformers refuses a model become one UserError."""
    try:
        yield
    except Exception as error:
        from_hub = isinstance(error, OSError) and source.folder is None
        if from_hub or isinstance(error, MemoryError) or "memory" in str(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):  # torch's advice is to load it with weights_only=False
            reason = "a file holds other objects than tensors, which are not loaded. Use safetensors"
        raise UserError(f"{source.where}: transformers refuses its {what}: {type(error).__name__}: {reason}") from None
