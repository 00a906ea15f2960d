"""docs/supported.md: what runs where, from what the code says of each scheme, kernel and version.

python -m benchmarks.supported      # rewrite the tables

A scheme on a GPU is what it says itself there (`refusal`), with the arithmetic of the GPU's datasheet. That every
kernel compiles for these GPUs is held by tests/kernels/test_compile.py.
"""

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from qtrain.core.hardware import capabilities
from qtrain.core.hardware.capabilities import FP8_CAPABILITY, MX_CAPABILITY, WGMMA_CAPABILITY
from qtrain.core.hardware.datasheets import DATASHEET
from qtrain.core.hardware.device import Hardware
from qtrain.quant import SCHEMES
from qtrain.quant.gemm_table import emulates_grouped
from qtrain.quant.scheme import LowBitScheme, Scheme

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "supported.md"
_SECTION = re.compile(r"(<!-- supported: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

GPUS = {
    80: ("A100", "A100 PCIe"),
    86: ("RTX 3090",),
    89: ("RTX 4090", "L40S"),
    90: ("H100", "H100 PCIe", "H200", "H800"),
    100: ("B200", "GB200"),
    120: ("RTX 5090", "RTX PRO 6000"),
}
"""Compute capabilities that kernels are compiled for, and the products of `core/hardware/datasheets.py`."""
SIZE = 4096
"""In- and out-features of the linear that is asked about: a multiple of every block."""


@contextmanager
def pretended(capability: int) -> Iterator[torch.device]:
    """A GPU of this compute capability, as far as schemes ask."""
    found = patch.object(capabilities, "compute_capability", lambda device: divmod(capability, 10))
    with found, patch.object(torch.cuda, "get_device_name", lambda device: f"sm_{capability}"):
        yield torch.device("cuda")


def low_bit_arithmetics(scheme: Scheme) -> set[str]:
    """Those of its GEMMs without bf16."""
    return set(scheme.gemm_dtypes().values()) - {"bf16"}


def on_device(scheme: Scheme, device: torch.device, found: Hardware) -> str:
    """native: its GEMMs run on the device's tensor cores for their formats. emulated: with the same values, at the
    speed of another arithmetic. refused: linears stay in bf16."""
    if isinstance(scheme, LowBitScheme) and scheme.refusal(SIZE, SIZE, device):
        return "refused"
    # A 4-bit code that is unpacked to INT8 runs on the tensor cores of that.
    return "emulated" if any(map(found.emulates, low_bit_arithmetics(scheme))) else "native"


def experts(scheme: Scheme) -> str:
    """How products of several experts run where those of one linear are native."""
    if not isinstance(scheme, LowBitScheme):
        return "native"
    low_bit = [gemm for gemm, arithmetic in scheme.gemm_dtypes().items() if arithmetic != "bf16"]
    return "emulated" if any(emulates_grouped(*scheme.low_bit_formats(gemm)) for gemm in low_bit) else "native"


def schemes_table() -> str:
    """Schemes with their default options, by GPU; those that run alike in one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    lines = [
        "| schemes | " + " | ".join(f"sm_{arch}" for arch in GPUS) + " | experts | CPU |",
        "|---|" + "---|" * (len(GPUS) + 2),
    ]
    cpu = torch.device("cpu")
    for name in SCHEMES.names():
        if name == "auto":  # one of the others for each linear
            continue
        scheme = SCHEMES.make(name, {}, "--quantize")
        cells = []
        for arch, (product, *_) in GPUS.items():
            with pretended(arch) as device:
                cells.append(
                    on_device(scheme, device, Hardware(product, DATASHEET[product].peaks, None, measured=False))
                )
        refused = isinstance(scheme, LowBitScheme) and scheme.refusal(SIZE, SIZE, cpu)
        cells += [experts(scheme), "refused" if refused else "reference"]
        alike.setdefault(tuple(cells), []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in alike.items()]
    return "\n".join(lines) + "\n"


def gpus_table() -> str:
    """What the kernels use of each compute capability."""
    lines = [
        "| compute capability | such as | tensor cores used | kernels |",
        "|---|---|---|---|",
    ]
    for arch, names in GPUS.items():
        capability = divmod(arch, 10)
        arithmetics = ["bf16", "INT8"]
        arithmetics += ["FP8"] * (capability >= FP8_CAPABILITY)
        arithmetics += ["MXFP8"] * (capability >= MX_CAPABILITY)
        kernels = "Triton; Gluon with wgmma for block scales" if capability == WGMMA_CAPABILITY else "Triton"
        lines.append(f"| sm_{arch} | {', '.join(names)} | {', '.join(arithmetics)} | {kernels} |")
    return "\n".join([*lines, "| CPU | | | PyTorch: the definition of each kernel |"]) + "\n"


def versions_table() -> str:
    """Versions: what a library's range allows, and what is tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {re.split(r"[><=;]", line)[0]: line.split(";")[0] for line in project["dependencies"]}
    tested = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    (oldest,) = re.findall(r"^OLDEST_TRITON := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pythons = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    return (
        "| | required | tested set | more |\n|---|---|---|---|\n"
        f"| Python | {project['requires-python']} | {pythons[0]} | workflows: {', '.join(pythons)} |\n"
        f"| torch | {ranges['torch'].removeprefix('torch')} | {tested['torch']} | |\n"
        f"| triton | {ranges['triton'].removeprefix('triton')} | {tested['triton']} "
        f"| every kernel compiles with {oldest} (`make compile-oldest`) |\n"
    )


TABLES = {"schemes": schemes_table, "gpus": gpus_table, "versions": versions_table}


def rendered(text: str) -> str:
    """The page with its tables made again."""
    return _SECTION.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> None:
    PAGE.write_text(rendered(PAGE.read_text()))


if __name__ == "__main__":
    main()
