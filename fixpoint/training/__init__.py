"""Training, and comparing what was trained."""

from typing import Any

from fixpoint._messages import missing_extra

try:
    import lightning_fabric as _fabric  # noqa: F401
except ModuleNotFoundError:
    raise missing_extra("fixpoint.training", "lightning_fabric", "bench") from None

from fixpoint.training.commands.grid import make_grid
from fixpoint.training.engine.fit import Epoch, fit
from fixpoint.training.engine.model_factory import LAYERS, make_model
from fixpoint.training.engine.run_data import prepare
from fixpoint.training.engine.tasks import evaluate, make_task
from fixpoint.training.experiment import build_model, run_experiment
from fixpoint.training.history import record_training
from fixpoint.training.loading import Trained, load_trained
from fixpoint.training.recipe.schema import Recipe
from fixpoint.training.recipe.toml import load_recipe, read_recipe, write_recipe
from fixpoint.training.results.logs import LOGGERS
from fixpoint.training.results.store import read_records

__all__ = [
    "LAYERS",
    "LOGGERS",
    "Epoch",
    "Recipe",
    "Trained",
    "build_model",
    "evaluate",
    "fit",
    "load_recipe",
    "load_trained",
    "make_grid",
    "make_model",
    "make_task",
    "prepare",
    "read_recipe",
    "read_records",
    "record_training",
    "run_experiment",
    "write_recipe",
]

_FORMER = {"build": "build_model", "execute": "run_experiment"}


def __getattr__(name: str) -> Any:
    """The names that functions had before."""
    if name in _FORMER:
        return globals()[_FORMER[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
