"""The schema of a lesson (model.kind: mlp) and its loader. No torch: what a lesson does is in jobs/lessons.

A lesson is the toy of Stanford's CS336 lecture on parallelism: a batch of random numbers through square
layers with GELU, the mean of squares as loss. Its words are a JobSpec's.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from jobs.mesh import Mesh
from jobs.spec.base import SpecSection
from jobs.spec.overrides import apply_overrides
from jobs.spec.schema import problems_of
from jobs.spec.tree import Tree, spec_error
from jobs.spec.yaml_tree import read_yaml

Lesson = Literal["collectives", "dp", "tp", "sp", "pp", "zero", "ep", "cp"]
AXIS_OF: dict[Lesson, str] = {
    "collectives": "dp",
    "dp": "dp",
    "tp": "tp",
    "sp": "tp",
    "pp": "pp",
    "zero": "dp",
    "ep": "ep",
    "cp": "cp",
}
"""The key of the strategy that says over how many ranks a lesson runs."""
MAX_RANKS = 64


class MlpSpec(SpecSection):
    """Square layers: x = gelu(x @ weight), each weight [d_model, d_model]."""

    kind: Literal["mlp"]
    n_layers: int = Field(default=4, gt=0, le=64)
    d_model: int = Field(default=1024, gt=0, le=8192)
    n_experts: int = Field(default=8, gt=0, le=256)
    """Lesson ep: layers of which each token visits top_k."""
    top_k: int = Field(default=2, gt=0)
    n_heads: int = Field(default=8, gt=0)
    """Lesson cp: heads of its attention layer."""


class LessonStrategy(SpecSection):
    """Ranks along each axis; a lesson moves along one of them."""

    kind: Literal["native"] = "native"
    dp: int = Field(default=1, gt=0, le=MAX_RANKS)
    pp: int = Field(default=1, gt=0, le=MAX_RANKS)
    cp: int = Field(default=1, gt=0, le=MAX_RANKS)
    tp: int = Field(default=1, gt=0, le=MAX_RANKS)
    ep: int = Field(default=1, gt=0, le=MAX_RANKS)
    """Ranks that share the experts; each holds its own tokens as well."""


class LessonTrain(SpecSection):
    """How long and in what portions."""

    steps: int = Field(default=3, gt=0, le=1000)
    batch_size: int = Field(default=128, gt=0, le=65536)
    """Rows of the batch; lessons sp, ep and cp take them as the tokens of one sequence."""
    micro_batches: int = Field(default=4, gt=0)
    """Lesson pp: pieces of the batch that pass the stages one after another."""
    lr: float = Field(default=1e-3, gt=0)
    precision: Literal["fp32", "fp64"] = "fp32"


class LessonSpec(SpecSection):
    """One lesson."""

    lesson: Lesson
    model: MlpSpec
    train: LessonTrain = LessonTrain()
    strategy: LessonStrategy = LessonStrategy()

    @property
    def n_ranks(self) -> int:
        """Ranks of the lesson."""
        return int(getattr(self.strategy, AXIS_OF[self.lesson]))

    @property
    def mesh(self) -> Mesh:
        """The layout; experts are folded into data parallelism, as everywhere."""
        axis = AXIS_OF[self.lesson]
        return Mesh(dp=self.n_ranks, ep=self.n_ranks) if axis == "ep" else Mesh(**{axis: self.n_ranks})

    @model_validator(mode="after")
    def _one_axis(self) -> Self:
        own = AXIS_OF[self.lesson]
        for axis in LessonStrategy.model_fields:
            if axis not in ("kind", own) and getattr(self.strategy, axis) > 1:
                raise ValueError(
                    f"strategy.{axis}={getattr(self.strategy, axis)} with lesson {self.lesson}, which runs "
                    f"along {own}; leave strategy.{axis} out and set strategy.{own}"
                )
        return self

    @model_validator(mode="after")
    def _divides(self) -> Self:
        for name, size, what, parts in self._divisions():
            if size % parts:
                raise ValueError(f"{name}={size} does not divide by {what}={parts}")
        if self.lesson == "ep" and self.model.top_k > self.model.n_experts:
            raise ValueError(
                f"model.top_k={self.model.top_k} experts of model.n_experts={self.model.n_experts}"
            )
        return self

    def _divisions(self) -> list[tuple[str, int, str, int]]:
        """(key, its value, what it has to divide by, that number) of this lesson."""
        model, ranks = self.model, self.n_ranks
        axis = f"strategy.{AXIS_OF[self.lesson]}"
        batch = ("train.batch_size", self.train.batch_size)
        width = ("model.d_model", model.d_model)
        match self.lesson:
            case "collectives" | "dp":
                return [(*batch, axis, ranks)]
            case "zero":
                return [(*batch, axis, ranks), (*width, axis, ranks)]
            case "tp" | "sp":
                pairs = ("model.n_layers", model.n_layers, "2 (layers work in pairs: columns, then rows)", 2)
                return [(*width, axis, ranks), pairs, *([(*batch, axis, ranks)] * (self.lesson == "sp"))]
            case "pp":
                return [
                    ("model.n_layers", model.n_layers, axis, ranks),
                    (*batch, "train.micro_batches", self.train.micro_batches),
                ]
            case "ep":
                return [(*batch, axis, ranks), ("model.n_experts", model.n_experts, axis, ranks)]
            case "cp":
                zigzag = (*batch, f"2 x {axis} (zig-zag: each rank holds two pieces)", 2 * ranks)
                return [zigzag, (*width, "model.n_heads", model.n_heads)]


def load_lesson(path: str | Path, overrides: Sequence[str] = ()) -> LessonSpec | None:
    """The lesson in a YAML file; None where the file is no lesson (its model.kind is not mlp).

    Args:
        path: the YAML file.
        overrides: `key.key=value` each, as given to --set.

    Raises:
        SpecError: not YAML; or a lesson with something wrong, one line each: `file:line: key.path: message`.
    """
    tree = read_yaml(Path(path))
    apply_overrides(tree, overrides)
    if not is_lesson(tree):
        return None
    try:
        spec = LessonSpec.model_validate_json(json.dumps(tree.root))
    except ValidationError as error:
        blamed = {problem.path for problem in tree.problems}
        found = problems_of(error.errors(include_url=False), tree, LessonSpec)
        tree.problems += [problem for problem in found if problem.path not in blamed]
        raise spec_error(tree.problems) from None
    if tree.problems:
        raise spec_error(tree.problems)
    return spec


def is_lesson(tree: Tree) -> bool:
    """Whether the file is a lesson and no run: by its model, or by the key `lesson`."""
    return tree.get(("model", "kind")) == "mlp" or tree.has(("lesson",))
