"""A character model that writes Python, on one device: the twin of ../char_gpt.py."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="learn from this file")
parser.add_argument("--short", action="store_true", help="a tiny model, a few steps, for a test")
args = parser.parse_args()
context, width, depth = (32, 64, 2) if args.short else (128, 256, 6)

sources = [args.text] if args.text else sorted(Path(argparse.__file__).parent.glob("*.py"))
text = "".join(path.read_text(errors="replace") for path in sources)
text = text[: 20_000 if args.short else 2_000_000].encode("ascii", errors="replace")
windows = torch.tensor(list(text)).unfold(0, context + 1, context)
train_set = TensorDataset(windows[:, :-1], windows[:, 1:])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols, self.places = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128))

    def forward(self, x):
        return self.head(self.blocks(self.symbols(x) + self.places.weight[: x.shape[1]]))


def loss(logits, targets):
    # A loss for each character: the gradient is that of the mean over all characters.
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for inputs, targets in DataLoader(train_set, batch_size=32, shuffle=True):
    optimizer.zero_grad()
    loss(model(inputs), targets).mean().backward()
    optimizer.step()

model.eval()
torch.manual_seed(0)
written = torch.tensor([list(b"def ")], device=next(model.parameters()).device)
with torch.no_grad():
    for _ in range(20 if args.short else 400):
        chances = model(written[:, -context:])[:, -1].softmax(-1)
        written = torch.cat([written, torch.multinomial(chances, 1)], dim=1)
print(bytes(written[0].tolist()).decode())
