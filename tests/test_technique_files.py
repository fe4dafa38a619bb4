"""What makes a technique file liftable: its header, its size, and that it runs on its own."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "memlab" / "techniques"
FILES = sorted(file for file in FOLDER.glob("*.py") if file.name != "__init__.py")
LABELS = ("Computes", ("Without", "Instead"), "Memory", "Use", "Price", "Source", "Unlike")

# copied into an empty folder, with memlab blocked
ALONE = {
    "chunked_loss": """
import torch
from chunked_loss import chunked_cross_entropy
hidden = torch.randn(2, 5, 4, requires_grad=True)
head, labels = torch.nn.Linear(4, 9), torch.randint(9, (2, 5))
loss = chunked_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten())
loss.backward()
assert hidden.grad is not None and head.weight.grad is not None
""",
    "fused_head": """
import torch
sys.modules["triton"] = None
from fused_head import fused_cross_entropy
hidden = torch.randn(2, 5, 4, requires_grad=True)
head, labels = torch.nn.Linear(4, 9), torch.randint(9, (2, 5))
for frugal in (False, True):
    loss = fused_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten(), frugal=frugal)
    loss.backward()
    assert hidden.grad is not None and head.weight.grad is not None
""",
    "chunked_logprobs": """
import torch
from chunked_logprobs import token_logprobs
h, w = (torch.randn(n, 4, requires_grad=True) for n in (3, 9))
token_logprobs(h, w, torch.tensor([1, -100, 8]))[2].backward()
assert h.grad[2].any() and not h.grad[:2].any() and w.grad is not None
""",
    "chunked_divergence": """
import torch
from chunked_divergence import divergence
h, w = (torch.randn(n, 4, requires_grad=True) for n in (3, 9))
teacher = {"h": torch.randn(3, 2), "w": torch.randn(9, 2)}
divergence(h, w, torch.tensor([1, -100, 8]), teacher=teacher).backward()
assert h.grad[2].any() and not h.grad[1].any() and w.grad is not None
""",
    "liger": """
import torch
from liger import cross_entropy
h, w, y = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([1, -100])
try:
    cross_entropy(h, w, y)
except ValueError as error:
    assert "use_liger_kernel=True on 'cpu'" in str(error)
else:
    raise AssertionError
""",
    "liger_losses": """
import importlib.util, torch
from liger_losses import jsd
h, w, y = torch.randn(2, 3, requires_grad=True), torch.randn(5, 3), torch.tensor([1, -100])
if importlib.util.find_spec("liger_kernel"):
    jsd(h, w, y, teacher={"h": h.detach() + 1, "w": w}).backward()
    assert h.grad[0].any() and not h.grad[1].any()
""",
    "packing": """
sys.modules["torch"] = None
from packing import pack
assert pack([[1, 2, 3, 4, 5], [6, 7]], 4, strategy="bfd_split")["input_ids"] == [
    [1, 2, 3, 4], [6, 7, 5]
]
""",
    "pad_to_multiple": """
from pad_to_multiple import collate, pad
batch = collate([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}], pad_to_multiple_of=8)
assert batch["input_ids"].shape == (1, 8)
assert pad([[1], [2, 3]], 0, multiple=8, side="left").shape == (2, 8)
""",
    "padding_free": """
from padding_free import collate, model_inputs
batch = collate([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])
assert model_inputs(batch)["position_ids"].tolist() == [[0, 1, 2]]
""",
    "truncation": """
from truncation import truncate_sft
rows = [{"input_ids": [3, 4], "labels": [-100, 4]}]
assert truncate_sft(rows, 1, truncation_mode="keep_end") == [{"input_ids": [4], "labels": [4]}]
assert truncate_sft(rows, 1) == []
""",
    "varlen_attention": """
import torch
from varlen_attention import register, varlen_attention
q, cu_seqlens = torch.randn(5, 2, 8), torch.tensor([0, 3, 5], dtype=torch.int32)
assert varlen_attention(q, q, q, cu_seqlens, 3).shape == (5, 2, 8)
register()
""",
}

# Files that may be longer than 150 lines, and why.
LONGER = {
    "fused_head": 362,  # three kernels, a torch twin of each, and two orders of one computation
    "liger_losses": 164,  # four losses, and what Liger ignores, or takes wrongly, refused by name
    "packing": 190,  # placement 100x as quick as TRL's: bins in bulk, then who they were in NumPy
}


def test_every_technique_is_run_alone() -> None:
    assert {file.stem for file in FILES} == set(ALONE)


@pytest.mark.parametrize("name", ALONE)
def test_runs_alone_without_memlab(tmp_path: Path, name: str) -> None:
    shutil.copy(FOLDER / f"{name}.py", tmp_path)
    script = f'import sys\nsys.modules["memlab"] = None\n{ALONE[name]}'
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_header_and_size(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    header = (ast.get_docstring(tree) or "").splitlines()
    assert len(text.splitlines()) <= LONGER.get(file.stem, 150)
    assert len(header) <= 16
    labels = [line.split()[0] for line in header if line and not line.startswith(" ")]
    for label in LABELS:
        assert any(name in labels for name in ((label,) if isinstance(label, str) else label))
    assert any("Apache-2.0" in line for line in header)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert all((f.end_lineno or 0) - f.lineno < 40 for f in functions)
