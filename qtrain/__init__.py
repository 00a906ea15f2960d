"""qtrain: train and fine-tune transformers with low-bit arithmetic."""

import contextlib
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPTS = ("llm_pretrain", "llm_finetune", "timm_finetune", "tokenize_data", "benchmark_mm")


def _quiet_interrupt(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """sys.excepthook of the scripts: a Ctrl-C before they run prints one line. Python then ends the process by SIGINT,
    which shells report as exit code 130."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


_main = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
if _main.replace("-", "_").removeprefix("qtrain_") in SCRIPTS:  # of the repository, or an installed qtrain-* command
    sys.excepthook = _quiet_interrupt

__version__ = "0.1.0"


class _TorchvisionOnCPU(MetaPathFinder):
    """Declares two of torchvision's operators before it is imported beside a CPU build of torch.

    No build of torchvision matches those: of the CUDA wheel the Python side imports, its operators do not, and with it
    fail timm and parts of transformers. The schemas of the two let the import through.
    """

    declared: Any = None
    """The library of the schemas; without a reference to it they are withdrawn."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Called before every import; finds nothing itself."""
        if fullname == "torchvision" and self.declared is None:
            import torch

            if torch.version.cuda is None:
                with contextlib.suppress(RuntimeError):  # a torchvision built for this CPU has defined them already
                    self.declared = torch.library.Library("torchvision", "FRAGMENT")
                    self.declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                    self.declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _TorchvisionOnCPU())
