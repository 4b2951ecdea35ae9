"""Training, and comparing what was trained."""

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

# The names that these had before.
build = build_model
execute = run_experiment

__all__ = [
    "LAYERS",
    "Epoch",
    "Recipe",
    "Trained",
    "build",
    "build_model",
    "evaluate",
    "execute",
    "fit",
    "load_recipe",
    "load_trained",
    "make_grid",
    "make_model",
    "make_task",
    "prepare",
    "read_recipe",
    "record_training",
    "run_experiment",
    "write_recipe",
]
