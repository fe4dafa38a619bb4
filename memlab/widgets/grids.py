"""The lessons' grids: what each simulates, and the command that makes their files or checks them.

python -m memlab.widgets.grids 06               simulate all grids whose name starts so, write them
python -m memlab.widgets.grids 06 --sample 3    simulate three settings of each again, and compare
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memlab.experiments import Recipe, measure, recordings
from memlab.experiments.kernels import measure_parts
from memlab.experiments.record import TORCHTUNE
from memlab.experiments.sharded import one_of
from memlab.experiments.versions import versions
from memlab.instruments.measurement import Measurement
from memlab.widgets.grid import Grid, Setting, Value


@dataclass(frozen=True)
class GridSpec:
    """A recipe and the values of its switches; `chunk`, the rows a chunk, is one of them here.

    So are `kernels`, parts of Liger joined by "+", or "none", and `cards`, that share the
    parameters. Where an axis is no switch, `switches` turns a setting into switches.
    """

    base: Recipe
    axes: Mapping[str, Sequence[Value]]
    switches: Callable[[Setting], Setting] = dict

    def at(self, setting: Setting) -> Measurement:
        """Simulates one setting, on the grid or off it. Raises as `measure` does."""
        apart = ("chunk", "kernels", "cards")
        switches = self.switches({axis: v for axis, v in setting.items() if axis not in apart})
        recipe = self.base.replace(**switches)
        if kernels := setting.get("kernels"):
            return measure_parts(recipe, [] if kernels == "none" else str(kernels).split("+"))
        chunk = setting.get("chunk")
        assert chunk is None or isinstance(chunk, int)
        measured = measure(recipe, device="simulated", chunk=chunk)
        cards = setting.get("cards")
        return one_of(int(cards), measured) if cards else measured

    def simulate(self) -> Grid:
        """Simulates every setting."""
        about = {"recipe": json.dumps(asdict(self.base)), **versions()}
        return Grid.simulate(self.axes, self.at, about)


LENGTHS = (256, 512, 1024, 2048, 4096)
LONG = (256, 512, 1024, 2048, 3072, 4096, 6144, 8192)
MULTIPLES = (8, 64, 512, 1024, 1536, 2048)
ONE_ROW: dict[str, Any] = {"per_device_train_batch_size": 1, "max_length": 512}
BIG = Recipe.defaults(model="Qwen/Qwen3-1.7B")
PROMPT, TOGETHER = 256, 8  # tokens; completions that lesson 13 trains on together


def of_completions(setting: Setting) -> Setting:
    """A step of so many `completions` of PROMPT tokens each, trained on TOGETHER at a time.

    Raises ValueError for completions that are no multiple of TOGETHER.
    """
    completions, length = setting["completions"], setting["max_completion_length"]
    assert isinstance(completions, int)
    assert isinstance(length, int)
    if completions < 1 or completions % TOGETHER:
        raise ValueError(f"completions={completions}: give a multiple of {TOGETHER}")
    return {
        "gradient_accumulation_steps": completions // TOGETHER,
        "max_completion_length": length,
        "max_length": PROMPT + length,
    }


GRIDS = {
    "01_first_knobs": GridSpec(
        Recipe.off(),
        {
            "per_device_train_batch_size": (1, 2, 4),
            "gradient_accumulation_steps": (1, 2, 4),
            "dtype": ("bfloat16", "float32"),
            "optim": ("adamw_torch_fused", "sgd"),
        },
    ),
    "02_lengths": GridSpec(
        Recipe.off(),
        {
            "per_device_train_batch_size": (1, 4),
            "attn_implementation": ("memlab_attention", "eager"),
            "max_length": LONG,
        },
    ),
    "02_defaults": GridSpec(
        Recipe.defaults(), {"per_device_train_batch_size": (1, 4), "max_length": LONG}
    ),
    "04_claim": GridSpec(
        TORCHTUNE,
        {
            "packing": (False, True),
            "loss_type": ("nll", "chunked_nll"),
            "gradient_checkpointing": (False, True),
        },
    ),
    "03_batches": GridSpec(
        Recipe.defaults(dataset="docstrings"),
        {"per_device_train_batch_size": (8, 16, 32, 64, 128), "padding_free": (False, True)},
    ),
    "03_equal": GridSpec(
        Recipe.off(per_device_train_batch_size=8), {"padding_free": (False, True)}
    ),
    "05_multiples": GridSpec(Recipe.off(**ONE_ROW), {"pad_to_multiple_of": MULTIPLES}),
    "05_defaults": GridSpec(Recipe.defaults(**ONE_ROW), {"pad_to_multiple_of": MULTIPLES}),
    "06_chunks": GridSpec(
        Recipe.defaults(),
        {
            "chunk": (32, 64, 128, 256, 512, 1024, 2048, 4096),
            "max_length": LENGTHS,
            "gradient_checkpointing": (True, False),
        },
    ),
    "06_all_logits": GridSpec(
        Recipe.defaults(loss_type="nll"),
        {"max_length": LENGTHS, "gradient_checkpointing": (True, False)},
    ),
    "06_claim": GridSpec(
        BIG,
        {
            "per_device_train_batch_size": (1, 2, 4, 5, 6, 8, 12, 16),
            "loss_type": ("nll", "chunked_nll"),
        },
    ),
    "07_kernels": GridSpec(
        Recipe.off(),
        {
            "gradient_checkpointing": (False, True),
            "max_length": (256, 512, 1024, 1536, 2048, 4096),
            "kernels": (
                "none",
                "rms_norm",
                "rms_norm+rope",
                "rms_norm+rope+swiglu",
                "rms_norm+rope+swiglu+head",
                "head",
            ),
        },
    ),
    "07_claim": GridSpec(  # the setting of Liger's own figure, on one card
        Recipe.off(
            model="meta-llama/Llama-3.1-8B",
            per_device_train_batch_size=8,
            gradient_checkpointing=True,
        ),
        {
            "max_length": (512, 1024, 2048, 4096),
            "use_liger_kernel": (False, True),
            "cards": (1, 8),
        },
    ),
    "07_trl": GridSpec(  # its own chunked head, and Liger's layer kernels
        Recipe.defaults(),
        {"gradient_checkpointing": (False, True), "kernels": ("none", "rms_norm+rope+swiglu")},
    ),
    "07_pairs": GridSpec(
        Recipe.off(trainer="dpo"),
        {"per_device_train_batch_size": (1, 2, 4), "use_liger_kernel": (False, True)},
    ),
    "13_completions": GridSpec(
        Recipe.defaults(trainer="grpo", per_device_train_batch_size=TOGETHER),
        {"completions": (8, 16, 32, 48, 64), "max_completion_length": (64, 256, 1024)},
        of_completions,
    ),
    "13_at_once": GridSpec(
        Recipe.defaults(trainer="grpo", max_completion_length=256, max_length=PROMPT + 256),
        {"per_device_train_batch_size": (16, 32, 64, 128)},
    ),
}


def folder() -> Path:
    """Where the lessons' grids are: in the checkout's notebooks, or in the installed wheel."""
    return recordings.folder().parent / "grids"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: see the module's docstring. 1 where a simulation differs from the file."""
    parser = argparse.ArgumentParser(prog="python -m memlab.widgets.grids")
    parser.add_argument("prefix", nargs="?", default="", help="of the grids' names")
    parser.add_argument("--sample", type=int, help="compare so many settings, write nothing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    changed = []
    for name, spec in GRIDS.items():
        if not name.startswith(options.prefix):
            continue
        path = folder() / f"{name}.json"
        if options.sample is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            spec.simulate().save(path)
            print(f"wrote {path.name}", flush=True)
        else:
            found = Grid.load(path).differences(spec.at, sample=options.sample, seed=options.seed)
            changed += [f"{name}: {line}" for line in found]
    print("\n".join(changed), end="\n" if changed else "")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
