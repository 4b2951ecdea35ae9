"""Training and the comparison of its results."""

from fixpoint._messages import missing_extra

try:
    import lightning_fabric as _fabric  # noqa: F401
except ModuleNotFoundError:
    raise missing_extra("fixpoint.training", "lightning_fabric", "bench") from None

from fixpoint.training.commands.grid import make_grid
from fixpoint.training.commands.workers import Started, run_all
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
    "Started",
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
    "run_all",
    "run_experiment",
    "write_recipe",
]
