"""Are the chains that lowtide measures true? The papers' networks, beside a real plain step on the same machine.

    python -m benchmarks.measuring --output DIR [--device cuda] [--limit-seconds 330] [--only NAME ...] [--tiny]

For each network the chain is measured and written to DIR as a chain file; then plain steps run. The table compares the
sum of the stages' times with a plain step's time, and the simulated peak of store-all with the measured peak. Networks
whose plain step does not fit have a chain, and no comparison.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks import harness
from benchmarks.refusing import Parser, refuse, seconds_above_0, usable_folder
from torch import nn

import lowtide
from lowtide import zoo
from lowtide.runtime.meter import Meter

GIB = 2**30

# pofo: batch 16, 500 px; Hong: batch 128, 224 px; rotor's grid: 224, 500 and 1000 px, batches that fill a device.
SETTINGS: dict[str, dict[str, Any]] = {
    "resnet101-b16-500": {"name": "resnet101", "batch": 16, "image": 500},
    "gpt2-24x1024-b16-1024-bf16": {
        "name": "gpt2", "batch": 16, "length": 1024, "layers": 24, "width": 1024, "heads": 16, "dtype": "bfloat16",
    },
    "vgg19-b128-224": {"name": "vgg19", "batch": 128, "image": 224},
    "alexnet-b128-224": {"name": "alexnet", "batch": 128, "image": 224},
    "resnet18-b16-500": {"name": "resnet18", "batch": 16, "image": 500},
    "resnet50-b16-500": {"name": "resnet50", "batch": 16, "image": 500},
    "resnet152-b16-500": {"name": "resnet152", "batch": 16, "image": 500},
    "densenet121-b16-500": {"name": "densenet121", "batch": 16, "image": 500},
    "inception_v3-b16-500": {"name": "inception_v3", "batch": 16, "image": 500},
    "bert-b16-512-bf16": {"name": "bert", "batch": 16, "length": 512, "dtype": "bfloat16"},
    "resnet200-b16-500": {"name": "resnet200", "batch": 16, "image": 500},
    "resnet34-b16-500": {"name": "resnet34", "batch": 16, "image": 500},
    "densenet161-b16-500": {"name": "densenet161", "batch": 16, "image": 500},
    "densenet201-b16-500": {"name": "densenet201", "batch": 16, "image": 500},
    "resnet101-b32-224": {"name": "resnet101", "batch": 32, "image": 224},
    "resnet101-b8-1000": {"name": "resnet101", "batch": 8, "image": 1000},
    "resnet152-b8-1000": {"name": "resnet152", "batch": 8, "image": 1000},
    "densenet201-b32-224": {"name": "densenet201", "batch": 32, "image": 224},
    "resnet1001-b64-224": {"name": "resnet1001", "batch": 64, "image": 224},
}  # fmt: skip
# The same, small enough for a laptop: that the script runs is what it shows.
TINY = {"batch": 2, "image": 64, "length": 32, "layers": 2, "width": 32, "heads": 2, "vocabulary": 100}

NUM_WARM_UP, NUM_STEPS = 3, 9


def shrunk(setting: dict[str, Any]) -> dict[str, Any]:
    sizes = zoo.find(setting["name"]).defaults
    small = {key: value for key, value in TINY.items() if key in sizes}
    if setting["name"] in ("inception_v3", "alexnet"):
        small["image"] = 299
    return {"name": setting["name"], **small}


def step(model: nn.Module, sample: dict[str, Any]) -> None:
    model(**sample).backward()
    model.zero_grad(set_to_none=True)


def plain_step(model: nn.Module, sample: dict[str, Any], device: str) -> tuple[float, int]:
    """Seconds (the median of steps that follow each other without waiting) and peak bytes."""
    for _ in range(NUM_WARM_UP):
        step(model, sample)
    with Meter(device) as meter:
        step(model, sample)
    if device == "cpu":
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            step(model, sample)
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds), meter.peak_bytes
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step(model, sample)
        mark.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]
    return statistics.median(times), meter.peak_bytes


def compared(title: str, setting: dict[str, Any], device: str, folder: Path) -> dict[str, Any]:
    """Measure one network, write its chain, and compare."""
    torch.manual_seed(0)
    model, sample = zoo.make(**setting, device=device)
    begin = time.perf_counter()
    chain = lowtide.measure(model, sample, name=title)
    measuring_seconds = time.perf_counter() - begin
    chain.save(folder / f"{title}.json")
    predicted = lowtide.solve(chain, memory_budget="100TiB", strategy="store-all").peak_bytes
    launch = sum(sum(pair) for pair in chain.provenance["launch_seconds"])
    line: dict[str, Any] = {
        "network": title,
        "stages": chain.num_stages,
        "kinds": chain.provenance["num_kinds"],
        "measuring_seconds": measuring_seconds,
        "sum_seconds": chain.compute_seconds,
        "device_seconds": sum(sum(pair) for pair in chain.provenance["device_seconds"]),
        "launch_seconds": launch,
        "predicted_bytes": predicted,
    }
    try:
        seconds, peak_bytes = plain_step(model, sample, device)
    except torch.OutOfMemoryError:
        return {**line, "note": "a plain step does not fit"}
    return {
        **line,
        "plain_seconds": seconds,
        "plain_bytes": peak_bytes,
        "time_ratio": chain.compute_seconds / seconds,
        "peak_ratio": predicted / peak_bytes,
    }


def shown(line: dict[str, Any]) -> str:
    head = f"{line['network']:30} {line['stages']:4d} {line['kinds']:4d} {line['measuring_seconds']:6.1f} s"
    head += f" {1e3 * line['sum_seconds']:8.1f} ms"
    if "plain_seconds" not in line:
        return f"{head}   {line['note']}"
    return (
        f"{head} {1e3 * line['plain_seconds']:8.1f} ms {100 * (line['time_ratio'] - 1):+6.1f} %"
        f" {1e3 * line['launch_seconds']:8.1f} ms"
        f" {line['predicted_bytes'] / GIB:8.3f} {line['plain_bytes'] / GIB:8.3f}"
        f" {100 * (line['peak_ratio'] - 1):+6.2f} %"
    )


HEADING = (
    f"{'network':30} {'n':>4} {'kind':>4} {'measuring':>8} {'sum':>11} {'plain':>11} {'':8} {'launching':>11}"
    f" {'GiB':>8} {'plain':>8}"
)


def main() -> None:
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    harness.add_device_argument(parser)
    parser.add_argument(
        "--limit-seconds", type=seconds_above_0, default=330.0, help="start no new network after this time"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="only these networks, or settings")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    arguments = parser.parse_args()
    names = dict.fromkeys(setting["name"] for setting in SETTINGS.values())
    if unknown := sorted({*arguments.only} - {*SETTINGS, *names}):
        refuse(f"--only {unknown[0]}: unknown network; expected one of {', '.join(names)}")
    usable_folder(arguments.output)
    machine = torch.cuda.get_device_name() if arguments.device != "cpu" else "a CPU"
    print(f"{machine}, torch {torch.__version__}\n{HEADING}", flush=True)
    begin, lines, skipped = time.perf_counter(), list[dict[str, Any]](), list[str]()
    for title, setting in SETTINGS.items():
        if arguments.only and title not in arguments.only and setting["name"] not in arguments.only:
            continue
        if time.perf_counter() - begin > arguments.limit_seconds:
            skipped.append(title)
            continue
        try:
            used, named = (shrunk(setting), f"{title}-tiny") if arguments.tiny else (setting, title)
            line = compared(named, used, arguments.device, arguments.output)
        except Exception as error:  # one network must not take the others with it
            print(f"{title:30} {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        finally:
            gc.collect()
            if arguments.device != "cpu":
                torch.cuda.empty_cache()
        lines.append(line)
        print(shown(line), flush=True)
        written = {"machine": machine, "torch": torch.__version__, "networks": lines}
        (arguments.output / "measuring-results.json").write_text(json.dumps(written, indent=1) + "\n")
    if skipped:
        print("skipped for lack of time:", ", ".join(skipped))


if __name__ == "__main__":
    main()
