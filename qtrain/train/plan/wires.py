"""The links between GPUs, by name: what each carries and how long a message takes to start.

Bandwidths are per GPU and direction. NVLink and PCIe: of the datasheets (NVLink 3, 4, 5: 12 x 25, 18 x 25, 18 x 50
GB/s, H800 8 x 25; PCIe: 16 lanes), of which collectives reach ACHIEVED_IN_NODE: NCCL on four H200s moved 305 to 328
GB/s a GPU of NVLink 4's 450 in all-gathers of 256 MiB to 1 GiB, 323 to 339 in all-to-alls. Networks: the line rate of
one adapter per GPU, of which ACHIEVED_BETWEEN is assumed, not measured.
"""

from dataclasses import dataclass

from qtrain.core.errors import UserError, unknown_name
from qtrain.core.hardware import Hardware, product_of

ACHIEVED_IN_NODE, ACHIEVED_BETWEEN = 0.75, 0.9
START_SECONDS = 40e-6
"""Of a collective, however small: NCCL's 1 MiB on four H200s takes 37 us to 58 us."""


@dataclass(frozen=True)
class Wire:
    """line_rate: bytes per second; achieved: the share of it that collectives reach; message_seconds: to start another
    message of a collective to another rank."""

    name: str
    line_rate: float
    achieved: float
    message_seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a large collective."""
        return self.line_rate * self.achieved


def _wires() -> dict[str, Wire]:
    # Microseconds a message: assumed of the kind of link. NCCL sends to several peers at once, so that these are less
    # than a round trip.
    in_node = {"nvlink3": (300, 1), "nvlink": (450, 1), "nvlink5": (900, 1), "nvlink_h800": (200, 1)}
    in_node |= {"pcie4": (31.5, 3), "pcie": (63, 3)}
    between = {f"ib{gbit}": (gbit / 8, 2) for gbit in (200, 400, 800)}
    between |= {f"ethernet{gbit}": (gbit / 8, 10) for gbit in (10, 25, 100, 200, 400)}
    kinds = ((in_node, ACHIEVED_IN_NODE), (between, ACHIEVED_BETWEEN))
    return {
        name: Wire(name, rate * 1e9, achieved, us * 1e-6)
        for wires, achieved in kinds
        for name, (rate, us) in wires.items()
    }


WIRES = _wires()
"""The choices of --wire. nvlink: of Hopper; pcie: of the fifth generation."""

IN_NODE = {
    "H100": "nvlink",
    "H200": "nvlink",
    "H800": "nvlink_h800",
    "B200": "nvlink5",
    "A100": "nvlink3",
    "H100 PCIe": "pcie",
    "RTX 5090": "pcie",
    "A100 PCIe": "pcie4",
    "L40S": "pcie4",
    "RTX 4090": "pcie4",
    "RTX 3090": "pcie4",
}
"""What links the GPUs of a machine, by product."""


def find_wire(name: str) -> Wire:
    """The wire of --wire. Raises UserError."""
    if name.lower() not in WIRES:
        raise unknown_name("--wire", "wire", name, WIRES)
    return WIRES[name.lower()]


def wire_in_node(hardware: Hardware) -> Wire:
    """The wire inside a machine of this kind of GPU. Raises UserError for one whose links are not known."""
    product = product_of(hardware.name)
    if product not in IN_NODE:
        raise UserError(
            f"--world_size: how machines link a {hardware.name} is not known; plan for one of {', '.join(IN_NODE)} "
            "with --gpu."
        )
    return WIRES[IN_NODE[product]]
