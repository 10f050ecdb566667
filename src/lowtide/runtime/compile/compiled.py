"""Compiles the units of a split, each in several variants.

A *variant* of a stage is the same code compiled under another value of PyTorch's `activation_memory_budget`: the share
of its intermediate values that a compiled function may save for its backward, which computes the rest again by itself.
Variant 0 is compiled as the user's own settings say.

Equal stages share compilations. Dynamo keeps what it compiled at the code object of a function, and at most a few
entries there: so each kind of stage, and each variant of it, has a function of its own.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from lowtide.errors import PlanError, shown
from lowtide.runtime.compile.layouts import ChannelsLast, has_channels_last, is_image
from lowtide.runtime.compile.loss import CompiledLoss
from lowtide.runtime.compile.modes import Modes, hooks_of, in_training
from lowtide.runtime.compile.must_save import pass_that_marks
from lowtide.runtime.compile.op_times import measured_times
from lowtide.runtime.compile.regions import RECOMPILE_LIMIT, RegionLayer, regions_of
from lowtide.runtime.compile.saved import Saved, saved_as_one
from lowtide.runtime.model.call_site import Layer, Rank, is_compiled, layers_of
from lowtide.runtime.model.processes import is_distributed
from lowtide.runtime.model.sample import Sample
from lowtide.runtime.model.split import Split, StageSplit

DEFAULT_BUDGETS = (0.8, 0.6, 0.4, 0.0)
"""Shares for `activation_memory_budget`: a transformer block saves 2/3 at 0.8 in the same time (element-wise operations
are made again), 2/5 at 0.4, and at 0.0 little more than its input."""

# Each variant of each kind is a compilation of seconds; a network of many kinds has them for its most frequent ones.
_MOST_KINDS = 12

# For a share of nothing the partitioner saves inputs alone, also where something is marked as to be saved: the seeds of
# random numbers, and sums.
_NEXT_TO_NOTHING = 1e-6

# Rows of this many bytes are what tensor cores read at once.
_ALIGNED_BYTES = 16

# Compiled functions that are kept for the next `fit`: a few models with all their kinds and variants.
_MOST_FUNCTIONS = 256


def variant_name(budget: float) -> str:
    """The name, in chains and reports, of the variant compiled under an `activation_memory_budget`."""
    return f"budget {budget:g}"


class VariantChoice:
    """Which variant the compiled units of one model run as; all of them at once.

    Args:
        names: of the variants; variant 0 first.
    """

    __slots__ = ("index", "names")

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.index = 0

    @contextmanager
    def running(self, index: int) -> Iterator[None]:
        """Run as a variant within the block."""
        previous, self.index = self.index, index
        try:
            yield
        finally:
            self.index = previous


class CompiledLayer(Layer):
    """Runs a unit as the function of the variant that is chosen."""

    __slots__ = ("_functions", "_hooks", "_kind", "_modes", "choice")

    rank = Rank.CODE

    def __init__(
        self, module: nn.Module, kind: Hashable, compilers: Sequence[_Compiler], choice: VariantChoice
    ) -> None:
        super().__init__(module)
        self._kind = (kind, compilers[0])
        self._hooks = hooks_of(module)
        self._modes = Modes(module)
        self._functions = tuple(_compiled_function(kind, each) for each in compilers)
        self.choice = choice

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; as variant 0 where it has no such variant, or other modes than it was checked for."""
        index, module = self.choice.index, self.module
        if (hooks := hooks_of(module)) != self._hooks:  # Dynamo would not notice
            kind, compiler = self._kind
            return _compiled_function((kind, hooks), compiler)(module, *args, **kwargs)
        if index >= len(self._functions) or (index and not self._modes.are_as_then(module)):
            index = 0
        return self._functions[index](module, *args, **kwargs)

    @property
    def num_variants(self) -> int:
        """How many ways it can run."""
        return len(self._functions)


class CompiledModel(Protocol):
    """A model whose stages run compiled from `install` until `remove`."""

    compilation: Compilation
    choice: VariantChoice

    def num_variants(self, k: int) -> int:
        """How many ways stage k can run."""

    def install(self) -> None:
        """Run it compiled."""

    def settle_loss(self) -> None:
        """It has run in stages, so what its loss is like is known."""

    def remove(self) -> None:
        """Run it as before."""


class CompiledRegions:
    """A model that runs in compiled regions from `install` until `remove`; installed when made.

    Args:
        model: the model.
        split: its stages.
        compilation: how they are compiled.
    """

    def __init__(self, model: nn.Module, split: Split, compilation: Compilation) -> None:
        options, budgets = compilation.options, compilation.budgets
        self.compilation = compilation
        inside = dict(options)
        if options.get("backend", "inductor") == "inductor":
            # What crosses from one region to the next is laid out as they compute with it.
            rest = {key: value for key, value in options.items() if key != "mode"}
            inside = {**rest, "options": {**_inductor_options(options), "keep_output_stride": False}}
        in_part = split.num_stages == 1
        compilers = tuple(
            [_Compiler(each), *(_Compiler(each, b, in_part=in_part) for b in budgets)] for each in (inside, options)
        )
        self.choice = VariantChoice(("", *map(variant_name, budgets)))
        stages = {k: stage for k, stage, _, module in _units_to_compile(model, split) if _has_parts(module)}
        with_variants = _most_frequent(stage.kind for stage in stages.values())
        counts = [1 + len(budgets) if k in stages and s.kind in with_variants else 1 for k, s in split.numbered()]
        counts = [1 + len(budgets)] if in_part else counts  # whatever it is made of
        self._layer = RegionLayer(model, split, (compilers[0], compilers[1]), counts, self.choice)
        self.install()

    def num_variants(self, k: int) -> int:
        """How many ways stage k can run."""
        return self._layer.num_variants[k - 1]

    def install(self) -> None:
        """Run the model in regions."""
        self._layer.push()

    def settle_loss(self) -> None:
        """It is part of a region, whatever its size."""

    def remove(self) -> None:
        """Run it as before."""
        self._layer.remove()
        torch.clear_autocast_cache()


class CompiledStages:
    """The stages of a split, whose units run compiled from `install` until `remove`; installed when made.

    Units without submodules (one layer each) stay as they are, where there is nothing to gain in them. A large loss
    between units is compiled, too, where the model runs in stages.

    Args:
        model: the model.
        split: its stages.
        options: for `torch.compile`.
        budgets: of the variants beside variant 0.
        loss: whether the loss is compiled, too; None: where it is large.
        channels_last: whether images enter the model so; None: they do not, and it has not been tried.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        options: Mapping[str, Any],
        budgets: Sequence[float] = (),
        *,
        loss: bool | None = None,
        channels_last: bool | None = None,
    ) -> None:
        options = _for_equal_numbers(model, options) if budgets else dict(options)
        self.compilation = Compilation(options, tuple(budgets), loss, channels_last=channels_last)
        """How it is done; does not depend on what surrounds it any more."""
        compilers = [_Compiler(options), *(_Compiler(options, budget) for budget in budgets)]
        self.choice = VariantChoice(("", *map(variant_name, budgets)))
        self._model = model
        self._loss = CompiledLoss(_compiled_function("loss", compilers[0], _loss), always=loss is True)
        self._entrance = [ChannelsLast(model)] if channels_last else []
        self._layers: list[CompiledLayer] = []
        self._num_variants: dict[int, int] = {}
        compiled: dict[int, CompiledLayer] = {}
        units = list(_units_to_compile(model, split))
        with_variants = _most_frequent(stage.kind for _, stage, _, _ in units)
        for k, stage, place, module in units:
            if id(module) not in compiled:  # else it is called in several places
                used = compilers if stage.kind in with_variants and _has_parts(module) else compilers[:1]
                kind = (type(module), stage.kind or (id(model), stage.name), place)
                compiled[id(module)] = CompiledLayer(module, kind, used, self.choice)
                self._layers.append(compiled[id(module)])
            self._num_variants[k] = max(self.num_variants(k), compiled[id(module)].num_variants)
        self.install()

    def __len__(self) -> int:
        return len(self._layers)

    def num_variants(self, k: int) -> int:
        """How many ways stage k can run; 1 where nothing of it is compiled."""
        return self._num_variants.get(k, 1)

    def install(self) -> None:
        """Run the units compiled."""
        for layer in (*self._layers, *self._entrance):
            layer.push()
        if self.compilation.loss is not False:
            self._loss.install(self._model)

    def settle_loss(self) -> None:
        """From now on compile every loss of the model, which has run in stages, where it was seen to have a large one;
        where not, none.
        """
        if self.compilation.loss is None:
            self.compilation = replace(self.compilation, loss=self._loss.is_used)
            self._loss.always = self._loss.is_used
            if not self._loss.is_used:
                self._loss.remove(self._model)

    def remove(self) -> None:
        """Run them as before."""
        for layer in (*self._layers, *self._entrance):
            layer.remove()
        self._loss.remove(self._model)
        torch.clear_autocast_cache()


@dataclass(frozen=True, slots=True)
class Compilation:
    """How stages are compiled.

    Args:
        options: for `torch.compile`.
        budgets: of the variants beside variant 0.
        loss: whether the loss is compiled, too; None: where it is large.
        regions: whether all that the model does is compiled, in regions; else the units are, one by one.
        channels_last: whether images enter units so; None: they do not, and it has not been tried.
    """

    options: Mapping[str, Any]
    budgets: tuple[float, ...] = ()
    loss: bool | None = None
    regions: bool = False
    channels_last: bool | None = None

    def of(self, model: nn.Module, split: Split) -> CompiledModel:
        """The stages of a model, compiled and in place."""
        with in_training(model):  # a plan may be read from a file before the model is put into that mode
            if not self.regions:
                layout = self.channels_last
                return CompiledStages(model, split, self.options, self.budgets, loss=self.loss, channels_last=layout)
            options = self.options_for(model, alone=split.num_stages == 1)
            return CompiledRegions(model, split, replace(self, options=options, channels_last=None))

    def options_for(self, model: nn.Module, *, alone: bool = False) -> dict[str, Any]:
        """The options with which a model is compiled: where there are variants, those that make them equal.

        Args:
            model: the model.
            alone: whether it is one stage, whose variant no other one has to be equal to.
        """
        if not self.budgets:
            return dict(self.options)
        by_rule = not alone or torch.are_deterministic_algorithms_enabled()
        return _for_equal_numbers(model, self.options, by_rule=by_rule)

    def saved_as_one(self, model: nn.Module, split: Split, sample: Sample, share: float) -> Saved | None:
        """What the model would save as one region, if a part keeps about this share; None: no compiler tells.

        Raises:
            NoRegionsError, and Dynamo's own errors: where the model has no regions.
        """
        if self.options.get("backend", "inductor") != "inductor":
            return None
        return saved_as_one(model, split, sample, _inductor_options(self.options), share)

    def to_dict(self) -> dict[str, Any]:
        """As plain data.

        Raises:
            PlanError: where an option is not (a backend that is a function).
        """
        try:
            options = json.loads(json.dumps(dict(self.options)))
        except TypeError:
            raise PlanError(
                f"the compile options cannot be saved in a file ({shown(dict(self.options))}); "
                "give the backend as a string"
            ) from None
        return {
            "options": options,
            "budgets": list(self.budgets),
            "loss": self.loss,
            "regions": self.regions,
            "channels_last": self.channels_last,
            "torch": torch.__version__,
        }

    @classmethod
    def from_dict(cls, values: Any) -> Compilation:
        """The inverse of `to_dict`.

        Raises:
            PlanError: for data of another form, and for variants that were checked with another version of torch.
        """
        try:
            options, budgets = dict(values["options"]), tuple(float(budget) for budget in values["budgets"])
            version = values["torch"]
            loss, regions = values.get("loss", False), values.get("regions", False)  # older files do not have them
            layout = values.get("channels_last")
            if any(each not in (True, False, None) for each in (loss, layout)) or not isinstance(regions, bool):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise PlanError(f"compilation is {shown(values)}, which is invalid; was the file edited?") from None
        if budgets and version != torch.__version__:
            raise PlanError(
                f"the variants in this plan were checked with torch {shown(version)}, but this is "
                f"{torch.__version__}; call fit again"
            )
        return cls(options, budgets, loss, regions, layout)


def can_have_regions(options: Mapping[str, Any]) -> bool:
    """Whether a model can be compiled in regions with these options of `torch.compile`.

    Regions are for one shape each. Modes that replay CUDA graphs would copy weights, which are arguments of regions.
    """
    return options.get("dynamic") is False and options.get("mode") in (None, "default", "max-autotune-no-cudagraphs")


def num_alike(model: nn.Module, split: Split) -> int:
    """How many blocks share one compilation, on average; of a model without blocks, how many stages."""
    units = list(_units_to_compile(model, split))
    kinds = [(stage.kind or stage.name, place) for _, stage, place, module in units if _has_parts(module)]
    if not kinds:
        return split.num_stages // max(1, split.num_kinds)
    return len(kinds) // len(set(kinds))


def copies_images(model: nn.Module, split: Split, options: Mapping[str, Any], sample: Sequence[torch.Tensor]) -> bool:
    """Whether inductor copies what the convolutions of each unit read into another layout, and back.

    It computes convolutions with channels last. What a unit reads and returns is laid out as without compilation: with
    channels last where the sample or a weight was.
    """
    parts = (part for _, _, _, unit in _units_to_compile(model, split) for part in unit.modules())
    weights = [part.weight for part in parts if isinstance(part, nn.Conv2d)]
    is_usual = any(map(is_image, sample)) and not any(map(has_channels_last, (*weights, *sample)))
    return options.get("backend", "inductor") == "inductor" and bool(weights) and is_usual


def choice_of(model: nn.Module, split: Split) -> VariantChoice | None:
    """How the variants of a model's stages are chosen, where they are compiled."""
    regions = regions_of(model)
    if regions is not None and max(regions.num_variants) > 1:
        choice: VariantChoice = regions.choice
        return choice
    for path in split.paths:
        for layer in layers_of(model.get_submodule(path), CompiledLayer)[:1]:
            if len(layer.choice.names) > 1:
                return layer.choice
    return None


def _units_to_compile(model: nn.Module, split: Split) -> Iterator[tuple[int, StageSplit, int, nn.Module]]:
    """(stage from 1, the stage, the unit's place in it, its module) of each unit with something to fuse in it."""
    for k, stage in enumerate(split.stages, start=1):
        for place, unit in enumerate(stage.units):
            module = model.get_submodule(unit.path)
            if unit.path and (_has_parts(module) or _is_padded(module)) and not _is_compiled_by_user(module):
                yield k, stage, place, module


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_padded(module: nn.Module) -> bool:
    """Whether a compiler pads the product of a layer: with GPT-2's 50257 words as they are, the matrix products of a
    step take 81 ms on an H200, and 46 ms where the whole model is compiled.
    """
    if not isinstance(module, nn.Linear) or not module.weight.is_cuda:
        return False
    return any(size * module.weight.element_size() % _ALIGNED_BYTES for size in module.weight.shape)


def _is_compiled_by_user(module: nn.Module) -> bool:
    """Whether the user compiled a module; what another model's plan has compiled is compiled again."""
    return is_compiled(module) and not layers_of(module, CompiledLayer)


def _most_frequent(kinds: Iterable[str]) -> set[str]:
    return {kind for kind, _ in Counter(kinds).most_common(_MOST_KINDS)}


class _Compiler:
    """How one variant is compiled; two that do the same are equal.

    Args:
        options: for `torch.compile`.
        budget: the `activation_memory_budget` in force; None: the one that is.
        in_part: whether it is a model as one region that keeps a part. What is recomputed is then chosen by measured
            times, and kept short by milestones.
    """

    is_kept = True

    def __init__(self, options: Mapping[str, Any], budget: float | None = None, *, in_part: bool = False) -> None:
        self._options = dict(options)
        self._budget = budget
        self._in_part = in_part
        self._key = self._options, budget, in_part

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Compiler):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash((tuple(sorted(self._options)), self._budget))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, to be compiled when it is first called."""
        options = self._options
        if self._budget is not None:
            rest = {key: value for key, value in options.items() if key not in ("mode", "options")}
            options = {**rest, "backend": self._backend()}
        if "recompile_limit" in inspect.signature(torch.compile).parameters:  # torch 2.11 does not have it
            options = {"recompile_limit": RECOMPILE_LIMIT, **options}
        return torch.compile(function, **options)

    def compiled_graph(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """The function of a graph for such inputs."""
        function: Callable[..., Any] = self._backend()(graph, inputs)
        return function

    def _backend(self) -> Callable[..., Any]:
        return _backend(self._options, self._budget, in_part=self._in_part)


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _loss(scores: torch.Tensor, dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    return F.cross_entropy(scores.to(dtype), *args, **kwargs)


@functools.lru_cache(maxsize=_MOST_FUNCTIONS)
def _compiled_function(kind: Hashable, compiler: _Compiler, function: Callable[..., Any] = _call) -> Callable[..., Any]:
    """The function for one kind of unit, which equal ones share: in one model, and from one `fit` to the next.

    It has a code object of its own, where Dynamo keeps what it compiles.
    """
    return compiler.compiled(FunctionType(function.__code__.replace(), function.__globals__, "stage"))


def _backend(options: Mapping[str, Any], budget: float | None, *, in_part: bool = False) -> Callable[..., Any]:
    """The backend that the options name, with the budget, if there is one, in force whenever it compiles."""
    named = options.get("backend", "inductor")
    settings: dict[str, Any] = {}
    if named == "inductor":
        settings["config_patches"] = _inductor_options(options)
    else:
        settings = {key: options[key] for key in ("mode", "options") if options.get(key)}

    def compile_graph(graph: Any, inputs: Any, **more: Any) -> Any:
        from torch._dynamo import lookup_backend  # importing it takes seconds
        from torch._functorch import config

        backend, share = lookup_backend(named) if isinstance(named, str) else named, budget
        if share is None:
            return backend(graph, inputs, **settings, **more)
        own = settings
        if named == "inductor":
            own = {"config_patches": {**_passes(milestones=in_part), **settings["config_patches"]}}
            share = max(share, _NEXT_TO_NOTHING)
        # Variants that were checked, and those that several processes compile, have to be the same each time.
        times = _times() if in_part and not is_distributed() else {}
        with config.patch(activation_memory_budget=share, **times):
            return backend(graph, inputs, **own, **more)

    return compile_graph


def _times() -> dict[str, Any]:
    """What the partitioner is told of times; not where the user has told it something."""
    from torch._functorch import config

    name = "activation_memory_budget_runtime_estimator"
    found = measured_times() if getattr(config, name, None) == "flops" else None
    return {} if found is None else {name: found}


def _passes(*, milestones: bool) -> dict[str, Any]:
    """What inductor is told beside options, so that a function that keeps less recomputes nothing that would be
    something else, and with milestones little at once; not where there is a pass of the user's.
    """
    from torch._inductor import config

    name = "joint_custom_post_pass"
    return {name: pass_that_marks(milestones=milestones)} if getattr(config, name, True) is None else {}


def _inductor_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `mode` and `options` of `torch.compile` mean."""
    mode, given = options.get("mode"), options.get("options") or {}
    if mode in (None, "default"):
        return dict(given)
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode), **given}


def _for_equal_numbers(model: nn.Module, options: Mapping[str, Any], *, by_rule: bool = True) -> dict[str, Any]:
    """The options with which inductor gives all variants of a block the same numbers, as far as it can.

    Left alone it picks the shapes of its reductions by trying them, for each kernel by itself, and other shapes add in
    another order; and what a fused kernel hands on is rounded to 16 bits where it is saved and not where it is computed
    again. A mode that was asked for keeps its trials.

    Args:
        model: the model.
        options: for `torch.compile`.
        by_rule: whether shapes of reductions are chosen without trials.
    """
    if options.get("backend", "inductor") != "inductor":
        return dict(options)
    from torch._inductor import config

    settings: dict[str, Any] = {}
    if by_rule and hasattr(config, "deterministic"):
        settings["deterministic"] = options.get("mode") in (None, "default")
        settings["force_shape_pad"] = True  # else products would not be padded without trials
    if _computes_in_16_bits(model):
        settings["emulate_precision_casts"] = True
    if not settings:
        return dict(options)
    rest = {key: value for key, value in options.items() if key != "mode"}  # torch takes one of the two
    return {**rest, "options": {**settings, **_inductor_options(options)}}


def _computes_in_16_bits(model: nn.Module) -> bool:
    short = (torch.bfloat16, torch.float16)
    types = {parameter.device.type for parameter in model.parameters()}
    return any(p.dtype in short for p in model.parameters()) or any(torch.is_autocast_enabled(t) for t in types)
