"""How many public architectures can be captured, measured, and run in stages with the same gradients.

    python -m benchmarks.coverage --output coverage.json [--device cuda] [--limit-seconds 330] [--only NAME ...]

Takes networks whose values skip stages (`coverage_shapes`), and torchvision, timm and transformers where they are
installed, with random weights and small sizes. For each model:
capture, measuring (once, not for precision), and a step that recomputes every stage, whose gradients are compared
with a plain step's. Results are written after each model, as JSON and as a table in Markdown beside it. Models that
were not looked at while the rules of capture were written are marked.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only so; read when it starts

import torch
from benchmarks import coverage_shapes, harness
from benchmarks.gradient_check import check_gradients, plain_spread
from benchmarks.refusing import Parser, refuse, seconds_above_0, usable_file
from torch import nn

from lowtide import LowtideError
from lowtide.runtime.measure import timing as measure_time
from lowtide.runtime.measure.measure import capture_and_measure

Made = tuple[nn.Module, Any]

# What the table asks of a model: this share of the bytes before the loss in the chain, in stages or as side values, and
# no stage above this share.
INSIDE, LARGEST = 0.98, 0.25
# One model may take this long; a loop that hangs must not take the others' time.
MODEL_SECONDS = 60
# If plain steps differ among themselves (atomics on CUDA), each gradient may differ by this many times as much as it
# does in the plain steps: these are few, and a further one may lie somewhat farther off.
NOISE_FACTOR = 2

TORCHVISION = {
    "alexnet": 224, "vgg11": 64, "vgg19_bn": 64, "resnet18": 64, "resnet50": 64, "resnext50_32x4d": 64,
    "wide_resnet50_2": 64, "densenet121": 64, "densenet201": 64, "googlenet": 96, "inception_v3": 299,
    "mobilenet_v2": 64, "mobilenet_v3_large": 64, "mnasnet1_0": 64, "shufflenet_v2_x1_0": 64, "squeezenet1_1": 64,
    "efficientnet_b0": 64, "efficientnet_v2_s": 64, "regnet_y_400mf": 64, "convnext_tiny": 64, "vit_b_16": 224,
    "swin_t": 64, "swin_v2_t": 64, "maxvit_t": 224,
}  # fmt: skip
TIMM = {
    "resnet26d": 64, "resnetv2_50": 64, "seresnet50": 64, "ecaresnet26t": 64, "res2net50_26w_4s": 64,
    "hrnet_w18_small": 64, "dla34": 64, "dpn68": 64, "vovnet39a": 64, "cspresnet50": 64, "darknet53": 64,
    "repvgg_a0": 64, "ghostnet_100": 64, "efficientnet_lite0": 64, "tf_efficientnetv2_b0": 64, "mixnet_s": 64,
    "nfnet_l0": 64, "regnetx_002": 64, "convnextv2_atto": 64, "convmixer_768_32": 64, "vit_tiny_patch16_224": 224,
    "deit3_small_patch16_224": 224, "beit_base_patch16_224": 224, "cait_xxs24_224": 224,
    "swin_tiny_patch4_window7_224": 224, "mixer_s16_224": 224, "gmlp_ti16_224": 224, "resmlp_12_224": 224,
    "poolformer_s12": 64, "coat_tiny": 224, "levit_128s": 224, "maxvit_nano_rw_256": 256, "xcit_nano_12_p16_224": 224,
    "pit_ti_224": 224, "tnt_s_patch16_224": 224, "twins_pcpvt_small": 224, "visformer_tiny": 224,
    "edgenext_xx_small": 64, "mobilevit_xxs": 64, "fastvit_t8": 64, "inception_v4": 299, "inception_resnet_v2": 299,
    "xception41": 64, "nasnetalarge": 331, "selecsls42b": 64, "volo_d1_224": 224,
}  # fmt: skip
# Looked at, in some version, while the rules were written (transformers: up to the remark in coverage_transformers).
SEEN_WHILE_WRITING = {"hrnet_w18_small", "densenet121", "resnet18", "inception_v3"}


def image_model(library: str, name: str, image: int, batch: int = 4) -> Callable[[], Made]:
    def make() -> Made:
        module = importlib.import_module("torchvision.models" if library == "torchvision" else "timm")
        if library == "torchvision":
            extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            model = getattr(module, name)(weights=None, **extra)
        else:
            model = module.create_model(name, pretrained=False)
        return model, torch.randn(batch, 3, image, image)

    return make


def models(only: list[str]) -> list[tuple[str, str, bool, Callable[[], Made]]]:
    """(library, name, seen while writing, how to make it)."""
    found = [("lowtide", name, True, make) for name, make in coverage_shapes.FAMILIES.items()]
    for library, listed in (("torchvision", TORCHVISION), ("timm", TIMM)):
        if importlib.util.find_spec(library) is not None:
            found += [(library, n, n in SEEN_WHILE_WRITING, image_model(library, n, px)) for n, px in listed.items()]
    if importlib.util.find_spec("transformers") is not None:
        from benchmarks.coverage_transformers import FAMILIES

        names = list(FAMILIES)
        found += [("transformers", n, names.index(n) < names.index("gpt-neo"), FAMILIES[n]) for n in names]
    return [entry for entry in found if not only or entry[1] in only]


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(entry, device) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(entry, device) for entry in value)
    return value


def examined(make: Callable[[], Made], device: str) -> dict[str, Any]:
    """One line of the table."""
    torch.manual_seed(0)
    try:
        model, sample = make()
        model, sample = model.to(device).train(), moved(sample, device)
    except Exception as error:  # the library, not lowtide: another version, a missing name
        return {"verdict": "not made", "reason": one_line(error)}
    try:
        split, chain = capture_and_measure(model, sample)
        check = check_gradients(model, split, sample)
    except LowtideError as error:
        return {"verdict": "declined", "reason": one_line(error)}
    except Exception as error:
        return {"verdict": "failed", "reason": one_line(error)}
    total = max(1, split.activation_bytes)
    in_chain = sum(stage.saved_bytes for stage in chain.stages) + sum(side.num_bytes for side in chain.side_values)
    line = {
        "stages": chain.num_stages,
        "inside": min(1.0, in_chain / total),
        "side": split.side_bytes / total,
        "largest": split.largest_stage_bytes / total,
        "gradients": "equal" if check.equal else f"differ by {check.largest_difference:.1e}",
    }
    if not check.equal:
        spread = plain_spread(model, split, sample)
        line["gradients"] += f", plain steps by {max(spread.values(), default=0.0):.1e}"
        beyond = check.beyond(spread, NOISE_FACTOR)
        if beyond:
            return {**line, "verdict": "MISMATCH", "reason": ", ".join(beyond[:3])}
    good = line["inside"] >= INSIDE and line["largest"] <= LARGEST
    return {**line, "verdict": "pass" if good else "coarse", "reason": ""}


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class ModelTimeoutError(Exception):
    """A model took too long."""


def in_time(make: Callable[[], Made], device: str) -> dict[str, Any]:
    def ring(*_: Any) -> None:
        raise ModelTimeoutError(f"more than {MODEL_SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(MODEL_SECONDS)
    try:
        return examined(make, device)
    except ModelTimeoutError as error:
        return {"verdict": "timeout", "reason": str(error)}
    finally:
        signal.alarm(0)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    made = [line for line in lines if line["verdict"] not in ("not made", "timeout")]
    unseen = [line for line in made if not line["seen"]]
    return {
        "models": len(made),
        "passed": sum(line["verdict"] == "pass" for line in made),
        "unseen": len(unseen),
        "unseen_passed": sum(line["verdict"] == "pass" for line in unseen),
        "mismatches": sum(line["verdict"] == "MISMATCH" for line in made),
        "not_made_or_timed_out": len(lines) - len(made),
    }


def markdown(lines: list[dict[str, Any]], machine: str) -> str:
    total = summary(lines)
    text = [
        f"Measured on {machine}: {total['passed']} of {total['models']} models pass, and "
        f"{total['unseen_passed']} of the {total['unseen']} that were not looked at while the rules were written; "
        f"silent mismatches: {total['mismatches']}.",
        "",
        "| library | model | stages | bytes inside | side values | largest stage | gradients | verdict |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for line in lines:
        name = line["model"] + ("" if line["seen"] else " *")
        verdict = line["verdict"] + (f": {line['reason']}" if line["reason"] else "")
        if "stages" in line:
            shares = f"{line['inside']:.1%} | {line['side']:.1%} | {line['largest']:.1%}"
            cells = f"{line['stages']} | {shares} | {line['gradients']}"
        else:
            cells = "- | - | - | - | -"
        text.append(f"| {line['library']} | {name} | {cells} | {verdict.replace('|', '/')} |")
    return "\n".join([*text, "", "\\* not looked at while the rules of capture were written", ""])


def main() -> None:
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="a JSON file; the table is written beside it")
    harness.add_device_argument(parser)
    parser.add_argument(
        "--limit-seconds", type=seconds_above_0, default=330.0, help="start no new model after this time"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="only these models")
    arguments = parser.parse_args()
    chosen = models(arguments.only)
    if unknown := sorted({*arguments.only} - {name for _, name, _, _ in chosen}):
        refuse(f"--only {unknown[0]}: unknown model; docs/coverage.md lists them")
    usable_file(arguments.output)
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    measure_time._FEWEST_RUNS = measure_time._MOST_RUNS = 2  # times are not looked at here
    if arguments.device != "cpu":
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    machine = torch.cuda.get_device_name() if arguments.device != "cpu" else "a CPU"
    machine += f", torch {torch.__version__}"
    begin, lines, skipped = time.perf_counter(), list[dict[str, Any]](), []
    for library, name, seen, make in chosen:
        if time.perf_counter() - begin > arguments.limit_seconds:
            skipped.append(name)
            continue
        started = time.perf_counter()
        line = {"library": library, "model": name, "seen": seen, **in_time(make, arguments.device)}
        line["seconds"] = round(time.perf_counter() - started, 1)
        lines.append(line)
        print(
            f"{library:12s} {name:32s} {line['verdict']:10s} {line['seconds']:5.1f} s  {line['reason'][:90]}",
            flush=True,
        )
        written = {"machine": machine, "summary": summary(lines), "skipped": skipped, "models": lines}
        arguments.output.write_text(json.dumps(written, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(markdown(lines, machine))
    print(summary(lines), "skipped:", skipped)


if __name__ == "__main__":
    main()
