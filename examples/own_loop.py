"""Your own model and loop in INT8, with 8-bit AdamW: `python -m examples.own_loop`.

What differs from plain PyTorch are the three lines with `qtrain`.
"""

import inspect
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import qtrain

CONTEXT, WIDTH = 64, 128


class CharacterModel(nn.Module):
    """A small transformer that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.embed(tokens) + self.position[: tokens.shape[1]], mask=mask, is_causal=True)
        return self.head(hidden)


def main(steps: int = 60) -> list[float]:
    """Trains on the source of `inspect`. Returns the losses, in nats a byte."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.tensor(list(inspect.getsource(inspect).encode()), device=device)
    model = CharacterModel().to(device)
    print(qtrain.quantize(model, "int8", overrides={"head": "bf16"}))
    optimizer = qtrain.optim.AdamW8bit(model, lr=3e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (16,))
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 19:
            print(f"step {step + 1}: {loss.item():.3f} nats a byte")
    with tempfile.TemporaryDirectory() as folder:
        held = qtrain.save_quantized(model, Path(folder) / "int8", "ct_int8")
        tensors = load_file(Path(folder) / "int8" / "model.safetensors")
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        print(f"saved {len(held)} matrices in INT8, {size / 1e6:.2f} MB in all")
    return losses


if __name__ == "__main__":
    main()
