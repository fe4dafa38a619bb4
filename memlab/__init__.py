"""memlab: fit LLM post-training into less GPU memory, and see where the bytes went.

Nothing heavy is imported until a name is asked for: `memlab.measure` loads torch,
`import memlab` does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Comparison": "memlab.experiments",
    "Measurement": "memlab.instruments.measurement",
    "MemlabError": "memlab.errors",
    "Recipe": "memlab.experiments",
    "Row": "memlab.experiments.row",
    "check": "memlab.lessons",
    "compare": "memlab.experiments",
    "measure": "memlab.experiments",
}

if TYPE_CHECKING:
    from memlab.errors import MemlabError
    from memlab.experiments import Comparison, Recipe, compare, measure
    from memlab.experiments.row import Row
    from memlab.instruments.measurement import Measurement
    from memlab.lessons import check

__all__ = [
    "Comparison",
    "Measurement",
    "MemlabError",
    "Recipe",
    "Row",
    "check",
    "compare",
    "measure",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memlab' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
