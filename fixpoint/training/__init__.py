"""Training, and comparing what was trained."""

from fixpoint.training.factory import LAYERS, make_model
from fixpoint.training.fit import Epoch, fit
from fixpoint.training.grid import make_grid
from fixpoint.training.prepare import prepare
from fixpoint.training.recipe import Recipe
from fixpoint.training.recipe_files import load_recipe, read_recipe, write_recipe
from fixpoint.training.run import build, execute
from fixpoint.training.tasks import evaluate, make_task
from fixpoint.training.trained import Trained, load_trained

__all__ = [
    "LAYERS",
    "Epoch",
    "Recipe",
    "Trained",
    "build",
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
    "write_recipe",
]
