"""qtrain: train and fine-tune transformers with low-bit arithmetic."""

import torch

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
