"""qtrain: train and fine-tune transformers with low-bit arithmetic."""

import sys
from pathlib import Path
from types import TracebackType

SCRIPTS = ("llm_pretrain", "llm_finetune", "timm_finetune", "tokenize_data", "benchmark_mm")


def _quiet_interrupt(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """sys.excepthook of the scripts: a Ctrl-C during their imports, which take seconds, prints one line. Python then
    ends the process by SIGINT, which shells report as exit code 130."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


_main = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
if _main.replace("-", "_").removeprefix("qtrain_") in SCRIPTS:  # of the repository, or an installed qtrain-* command
    sys.excepthook = _quiet_interrupt

import torch  # noqa: E402

__version__ = "0.1.0"

if torch.version.cuda is None:
    # A CPU build of torch has no matching torchvision build: the CUDA wheel's Python side imports, its operators do
    # not, and with it fail timm and parts of transformers. Declaring the two operators' schemas lets the import
    # through. The library object must stay alive, else the declarations are withdrawn.
    try:
        _torchvision_schemas = torch.library.Library("torchvision", "FRAGMENT")
        _torchvision_schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _torchvision_schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:  # a torchvision built for this CPU has defined them already
        pass
