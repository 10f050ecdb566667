"""`lowtide measure`: from a network to a chain file."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide import zoo
from lowtide.chain import Chain
from lowtide.cli.options import Json
from lowtide.cli.output import output_of_others_aside, print_json, print_pairs, print_table
from lowtide.errors import CaptureError, LowtideError, SampleError, shown
from lowtide.files import check_can_write
from lowtide.progress import DelayedProgress
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from torch import nn

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A network of the zoo (resnet101, gpt2, ...), or package.module:function returning (model, sample).",
        show_default=False,
    ),
]
OutputFile = Annotated[
    str | None, typer.Option("-o", "--output", metavar="CHAIN.json", help="Write the chain here.", show_default=False)
]
Stages = Annotated[
    list[str] | None,
    typer.Option(
        "--stages",
        metavar="PATTERN",
        help="Paths of submodules that are stages, such as 'encoder.layer.*'; give it several times.",
        show_default=False,
    ),
]
OptimizerKind = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="KIND",
        help="Count this optimizer's state: adam, sgd, sgd-momentum, ...",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="cuda or cpu; else cuda where there is one.", show_default=False),
]
DataType = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="TYPE", help="For the zoo: float32, the default, bfloat16 or float16.", show_default=False
    ),
]


def _size(name: str, text: str) -> Any:
    return typer.Option(f"--{name}", metavar="N", help=f"For the zoo: {text}.", show_default=False, min=1)


EXAMPLES = (
    "lowtide measure resnet101 --batch 16 --image 500 -o chain.json",
    "lowtide measure gpt2 --layers 24 --width 1024 --heads 16 -o chain.json",
    "lowtide measure my_package.training:make -o chain.json",
)


def command(
    target: Target,
    output: OutputFile = None,
    batch: Annotated[int | None, _size("batch", "samples in a batch")] = None,
    image: Annotated[int | None, _size("image", "pixels a side")] = None,
    length: Annotated[int | None, _size("length", "tokens in a sequence")] = None,
    layers: Annotated[int | None, _size("layers", "blocks of a transformer")] = None,
    width: Annotated[int | None, _size("width", "its width")] = None,
    heads: Annotated[int | None, _size("heads", "its attention heads")] = None,
    vocabulary: Annotated[int | None, _size("vocabulary", "its tokens")] = None,
    dtype: DataType = None,
    device: Device = None,
    stages: Stages = None,
    optimizer: OptimizerKind = None,
    json: Json = False,
) -> None:
    """Measure what each stage of a network costs, and write it as a chain.

    The network runs on this machine, stage by stage. Exit status 2: no chain of stages was found in it.
    """
    sizes = {
        "batch": batch,
        "image": image,
        "length": length,
        "layers": layers,
        "width": width,
        "heads": heads,
        "vocabulary": vocabulary,
    }
    if output is not None:
        check_can_write(output)
    with output_of_others_aside():
        model, sample, name = _made(target, {k: v for k, v in sizes.items() if v is not None}, dtype, device)
    from lowtide.runtime.measure.measure import measure

    try:
        with output_of_others_aside(), DelayedProgress() as progress:
            chain = measure(model, sample, stages=stages, optimizer=optimizer, name=name, progress=progress)
    except SampleError as error:
        raise _does_not_run(target, error.__cause__ or error) from error
    except LowtideError:
        raise
    except Exception:
        _check_runs(target, model, sample)
        raise
    if output is not None:
        chain.save(output)
    if json:
        print_json(chain.to_dict())
    else:
        _print_chain(chain, output)


def _made(target: str, sizes: dict[str, int], dtype: str | None, device: str | None) -> tuple[nn.Module, Any, str]:
    """The model, its sample and its name."""
    if ":" in target:
        for option in (*sizes, *(["dtype"] if dtype is not None else [])):
            raise CaptureError(f"--{option} is for networks of the zoo; leave it out: {target} makes its own model")
        model, sample = from_function(target)
        _check_device(target, model, device)
        return model, sample, target
    dtype = dtype or "float32"
    zoo.find(target)  # a wrong name is refused before torch is imported
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise CaptureError(f"--device {chosen} cannot be used: {first_line}; try --device cpu") from None
    model, sample = zoo.make(target, device=chosen, dtype=dtype, **sizes)
    described = " ".join([target, *(f"{key}={value}" for key, value in sizes.items()), dtype])
    return model, sample, described


def from_function(target: str) -> tuple[nn.Module, Any]:
    """Call the user's function."""
    module_name, _, function_name = target.partition(":")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("/", ".")
        right = f"{dotted}:{function_name or 'function'}"
        raise CaptureError(f"{target}: a module is named without .py and with dots; write {right}")
    if not module_name or not function_name:
        missing = "function" if module_name else "module"
        raise CaptureError(f"{target!r} lacks the name of a {missing}; write module:function")
    module = _imported(target, module_name)
    try:
        function = getattr(module, function_name)
    except AttributeError:
        raise CaptureError(f"{target}: module {module_name!r} has no {function_name!r}") from None
    except (Exception, SystemExit) as error:  # a module may import what it has when it is asked for
        raise CaptureError(f"{target} cannot be loaded: {_described(error)}") from error
    if not callable(function):
        raise CaptureError(f"{target} is {shown(function)}, expected a function that returns (model, sample)")
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise CaptureError(f"{target}() failed with {_described(error)}; it is called without arguments") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise CaptureError(f"{target}() returned {type(made).__name__}, expected a tuple (model, sample)")
    return made


def _imported(target: str, module_name: str) -> ModuleType:
    """The user's module. What goes wrong in it is not a bug in lowtide; a script may even end the process."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` finds modules
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise CaptureError(f"{target}: {error}; run lowtide where the module can be imported") from None
    except (Exception, SystemExit) as error:
        failed = f"importing {module_name!r} failed with {_described(error)}"
        raise CaptureError(f"{target}: {failed}; fix that, or move the function to a module of its own") from error


def _check_device(target: str, model: Any, wanted: str | None) -> None:
    """A function puts its model where it likes: refuse `--device` where that is elsewhere."""
    parameters = getattr(model, "parameters", tuple)
    there = {parameter.device.type for parameter in parameters()}
    if wanted is not None and there and wanted.partition(":")[0] not in there:
        made = ", ".join(sorted(there))
        raise CaptureError(f"--device {wanted}: the model of {target} is on {made}; move it there in that function")


def _check_runs(target: str, model: nn.Module, sample: Any) -> None:
    """Where measuring failed: say so if the network does not run on its sample by itself, either."""
    import torch

    from lowtide.runtime.model.sample import Sample

    try:
        with torch.no_grad():
            Sample.of(sample).call(model)
    except Exception as error:
        raise _does_not_run(target, error) from error


def _does_not_run(target: str, error: BaseException) -> CaptureError:
    return CaptureError(f"{target} does not run on its sample: {_described(error)}; change its sizes")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _print_chain(chain: Chain, output: str | None) -> None:
    rows = [
        (
            stage.name,
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds),
            format_bytes(stage.output_bytes),
            format_bytes(stage.saved_bytes),
            format_bytes(stage.weight_bytes),
        )
        for stage in chain.stages
    ]
    print_table(("stage", "forward", "backward", "output", "saved", "weights"), rows)
    print()
    saved_bytes = sum(stage.saved_bytes for stage in chain.stages)
    pairs = [
        ("chain", f"{chain.name}, {chain.num_stages} stages"),
        ("measured on", str(chain.provenance.get("device", "?"))),
        ("plain step", format_seconds(chain.compute_seconds)),
        ("activations", format_bytes(saved_bytes)),
        ("weights", format_bytes(sum(stage.weight_bytes for stage in chain.stages))),
        ("base", format_bytes(chain.base_bytes)),
    ]
    if output is not None:
        pairs.append(("written to", output))
    print_pairs(pairs)
