"""Time containers and keyed modules on a GPU: by hand, with the peer, with kd.

    python -m benchmarks.gpu [--device cuda:0] [--seconds 170] [--only TEXT] [--json GPU.json]

All contenders run in one process, one thread, in turns. A figure is the minimum over the rounds of
the time of one call, from its start until the GPU is done (`wall`) or until the call returns, many
calls one after the other (`cpu`, time of the processor). Programs are those of
`benchmarks/programs`, with their tensors and modules made on the device. Rows are measured in order
until the seconds are over; what was not measured is listed. `--device cpu` tries the logic out.
"""

import argparse
import importlib
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from benchmarks.programs.__main__ import is_equal, peer_source, run
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

import kd_core
import kd_nn

Call = Callable[[], object]
NAMES = ("by hand", "peer", "kd")
LEAVES, MANY = 128, 1000
ROUNDS, ROUND_SECONDS, PROGRAM_ROUNDS = 7, 0.04, 7
PROGRAMS = {"ppo": 1, "sac": 1, "world_model": 2, "grpo": 6, "dqn": 1, "vae": 1, "team": 2} | {
    "evolution": 1,
    "decisions": 2,
    "graphs": 4,
    "bayes": 4,
    "table": 1,
}
"""How many iterations are timed."""
GOALS = {"kd/hand": 1.03, "kd/peer": 0.80}


class Row(NamedTuple):
    """One comparison: what it is called, and a call of each contender."""

    name: str
    build: Callable[[], Mapping[str, Call]]


def peer() -> Any:  # without its types
    return importlib.import_module("tensordict")


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def leaves(count: int, device: torch.device | str, rows: int = 64) -> dict[str, Tensor]:
    return {f"k{n}": torch.full((rows, 4), float(n), device=device) for n in range(count)}


def containers(entries: dict[str, Tensor], rows: int = 64) -> tuple[Any, Any]:
    return peer().TensorDict(entries, [rows]), kd_core.TensorDict(entries, [rows])


def each(call: Callable[[Any], object], hand: Call, pair: tuple[Any, Any]) -> dict[str, Call]:
    """Return the calls of three contenders: by hand, and one call of both containers."""
    return dict(zip(NAMES, (hand, partial(call, pair[0]), partial(call, pair[1])), strict=True))


def moves(device: torch.device) -> Iterator[Row]:
    def there(count: int) -> Mapping[str, Call]:
        entries = leaves(count, "cpu", 16)

        def hand() -> object:
            made = {key: leaf.to(device, non_blocking=True) for key, leaf in entries.items()}
            sync(device)
            return made

        return each(lambda td: td.to(device), hand, containers(entries, 16))

    def back(count: int, rows: int) -> Mapping[str, Call]:
        entries = leaves(count, device, rows)
        pair = containers(entries, rows)
        hand = partial(lambda: {key: leaf.cpu() for key, leaf in entries.items()})
        return each(lambda td: td.to("cpu"), hand, pair)

    def pinned() -> Mapping[str, Call]:
        entries = leaves(LEAVES, "cpu", 4096)
        if device.type == "cuda":
            entries = {key: leaf.pin_memory() for key, leaf in entries.items()}

        def hand() -> object:
            return {key: leaf.to(device, non_blocking=True) for key, leaf in entries.items()}

        return each(lambda td: td.to(device, non_blocking=True), hand, containers(entries, 4096))

    def packed() -> Mapping[str, Call]:
        entries = leaves(MANY, "cpu", 16)

        def hand() -> object:
            flat = torch.cat([leaf.view(-1) for leaf in entries.values()]).to(device)
            parts = flat.split([leaf.numel() for leaf in entries.values()])
            pairs = zip(entries.items(), parts, strict=True)
            return {key: part.view(leaf.shape) for (key, leaf), part in pairs}

        return each(lambda td: td.consolidate().to(device), hand, containers(entries, 16))

    yield Row(f"to the device, {MANY} leaves", partial(there, MANY))
    yield Row("to the device, 8 leaves", partial(there, 8))
    yield Row(f"to the cpu, {MANY} leaves", partial(back, MANY, 16))
    yield Row("to the cpu, 32 leaves of 1 MiB", partial(back, 32, 1 << 16))
    yield Row(f"pinned, without waiting, {LEAVES} leaves", pinned)
    yield Row(f"in one storage to the device, {MANY} leaves", packed)


def arithmetic(device: torch.device) -> Iterator[Row]:
    entries = leaves(LEAVES, device)
    values = list(entries.values())
    ones = {key: torch.ones_like(leaf) for key, leaf in entries.items()}
    index = torch.randint(64, (32,)).to(device)
    mask = (torch.arange(64) % 2 == 0).to(device)
    few = leaves(8, device)

    def named(results: Any) -> object:  # of a foreach kernel
        return dict(zip(entries, results, strict=True))

    def row(name: str, call: Callable[[Any], object], hand: Call) -> Row:
        return Row(f"{name}, {LEAVES} leaves", lambda: each(call, hand, containers(entries)))

    yield row("td + 1", lambda td: td + 1, lambda: named(torch._foreach_add(values, 1)))
    yield row("td * td", lambda td: td * td, lambda: named(torch._foreach_mul(values, values)))
    yield row("exp", lambda td: td.exp(), lambda: named(torch._foreach_exp(values)))

    def in_place() -> Mapping[str, Call]:
        mine = [leaf.clone() for leaf in values]
        made = {key: leaf.clone() for key, leaf in entries.items()}
        pair = containers(made)
        return each(lambda td: td.mul_(1.0), lambda: torch._foreach_mul_(mine, 1.0), pair)

    def pairs_in_place() -> Mapping[str, Call]:
        mine, theirs = [leaf.clone() for leaf in values], list(ones.values())
        pair = containers({key: leaf.clone() for key, leaf in entries.items()})
        other = dict(zip(map(type, pair), containers(ones), strict=True))
        return each(
            lambda td: td.mul_(other[type(td)]),
            lambda: torch._foreach_mul_(mine, theirs),
            pair,
        )

    def copies() -> Mapping[str, Call]:
        mine, theirs = [leaf.clone() for leaf in values], list(ones.values())
        pair = containers({key: leaf.clone() for key, leaf in entries.items()})
        other = dict(zip(map(type, pair), containers(ones), strict=True))
        return each(
            lambda td: td.update_(other[type(td)]),
            lambda: torch._foreach_copy_(mine, theirs),
            pair,
        )

    yield Row(f"mul_ by a number, {LEAVES} leaves", in_place)
    yield Row(f"mul_ by a container, {LEAVES} leaves", pairs_in_place)
    yield Row(f"update_, {LEAVES} leaves", copies)
    yield row(
        "stack of 4",
        lambda td: type(td).maybe_dense_stack([td] * 4),
        lambda: {key: torch.stack([leaf] * 4) for key, leaf in entries.items()},
    )
    yield row(
        "cat of 4",
        lambda td: torch.cat([td] * 4),
        lambda: {key: torch.cat([leaf] * 4) for key, leaf in entries.items()},
    )
    for name, at in (("a row", 3), ("a slice", slice(8, 40)), ("row numbers", index)):
        yield row(
            f"index by {name}",
            lambda td, at=at: td[at],  # type: ignore[misc]  # bound in time
            lambda at=at: {key: leaf[at] for key, leaf in entries.items()},  # type: ignore[misc]
        )
    yield row(
        "index by a mask",
        lambda td: td[mask],
        lambda: named(
            [leaf.index_select(0, rows) for rows in [mask.nonzero().view(-1)] for leaf in values]
        ),
    )
    yield row("clone", lambda td: td.clone(), lambda: {k: v.clone() for k, v in entries.items()})
    yield Row(
        "td + 1, 8 leaves",
        lambda: each(
            lambda td: td + 1,
            lambda: dict(zip(few, torch._foreach_add(list(few.values()), 1), strict=True)),
            containers(few),
        ),
    )


def network(width: int, depth: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers).to(device)


def keyed(library: Any, net: nn.Sequential) -> Any:  # of either library
    steps = [
        library.TensorDictModule(layer, [f"h{n}"], [f"h{n + 1}"]) for n, layer in enumerate(net)
    ]
    return library.TensorDictSequential(*steps)


def modules(device: torch.device) -> Iterator[Row]:
    def sequence(width: int, depth: int, rows: int) -> Mapping[str, Call]:
        net, x = network(width, depth, device), torch.rand(rows, width, device=device)
        theirs, ours = keyed(importlib.import_module("tensordict.nn"), net), keyed(kd_nn, net)
        Theirs, Ours = peer().TensorDict, kd_core.TensorDict  # noqa: N806  # classes

        def hand() -> object:
            return net(x)

        return {
            "by hand": no_grad(hand),
            "peer": no_grad(lambda: theirs(Theirs({"h0": x}, [rows]))),
            "kd": no_grad(lambda: ours(Ours({"h0": x}, [rows]))),
        }

    def by_tensor() -> Mapping[str, Call]:
        net, x = network(64, 6, device), torch.rand(64, 64, device=device)
        theirs, ours = keyed(importlib.import_module("tensordict.nn"), net), keyed(kd_nn, net)
        calls = (lambda: net(x), lambda: theirs(h0=x), lambda: ours(h0=x))
        return dict(zip(NAMES, map(no_grad, calls), strict=True))

    def other_parameters() -> Mapping[str, Call]:
        net, x = network(64, 6, device), torch.rand(64, 64, device=device)
        own = {name: value.detach() * 2 for name, value in net.named_parameters()}
        pair = [lib.TensorDict.from_module(net).data * 2 for lib in (peer(), kd_core)]

        def swapped(params: Any) -> object:  # of either library
            with params.to_module(net):
                return net(x)

        calls = (lambda: functional_call(net, own, (x,)), *(partial(swapped, p) for p in pair))
        return dict(zip(NAMES, map(no_grad, calls), strict=True))

    def ensemble() -> Mapping[str, Call]:
        nets, x = [network(64, 2, device) for _ in range(4)], torch.rand(64, 64, device=device)
        params, buffers = stack_module_state(nets)
        base = nets[0]

        def one(own: Any, held: Any, x: Tensor) -> Tensor:  # dicts of torch
            result: Tensor = functional_call(base, (own, held), (x,))
            return result

        many = torch.vmap(one, (0, 0, None))
        made = []
        for library, lib in ((importlib.import_module("tensordict.nn"), peer()), (kd_nn, kd_core)):
            step = library.TensorDictModule(network(64, 2, device), ["x"], ["y"])
            both = library.EnsembleModule(step, 4).to(device)
            made.append(lambda both=both, lib=lib: both(lib.TensorDict({"x": x}, [64])))
        return dict(
            zip(NAMES, map(no_grad, (lambda: many(params, buffers, x), *made)), strict=True)
        )

    yield Row("sequence of 12, launch-bound", lambda: sequence(64, 6, 64))
    yield Row("sequence of 12, large", lambda: sequence(4096, 6, 4096))
    yield Row("sequence of 12, by tensor", by_tensor)
    yield Row("other parameters", other_parameters)
    yield Row("ensemble of 4", ensemble)


def graphs(device: torch.device) -> Iterator[Row]:
    def replays(width: int, rows: int) -> Mapping[str, Call]:
        net, x = network(width, 6, device), torch.rand(rows, width, device=device)
        library = importlib.import_module("tensordict.nn")
        theirs = library.CudaGraphModule(keyed(library, net))
        ours = kd_nn.CudaGraphModule(keyed(kd_nn, net))
        Theirs, Ours = peer().TensorDict, kd_core.TensorDict  # noqa: N806  # classes
        inputs = x.clone()
        stream = torch.cuda.Stream(device)
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                net(inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()

        def through(value: Tensor) -> list[Tensor]:
            results = [value]
            for layer in net:
                results.append(layer(results[-1]))
            return results[1:]

        with torch.no_grad(), torch.cuda.graph(graph):
            outputs = through(inputs)

        def hand() -> object:  # with all that a keyed sequence returns
            inputs.copy_(x)
            graph.replay()
            return [leaf.clone() for leaf in outputs]

        return {
            "by hand": no_grad(hand),
            "peer": no_grad(lambda: theirs(Theirs({"h0": x}, [rows]))),
            "kd": no_grad(lambda: ours(Ours({"h0": x}, [rows]))),
        }

    def alone(width: int, rows: int) -> Mapping[str, Call]:
        net, x = network(width, 6, device), torch.rand(rows, width, device=device)
        library = importlib.import_module("tensordict.nn")
        theirs, ours = library.CudaGraphModule(net), kd_nn.CudaGraphModule(net)
        inputs = x.clone()
        with torch.no_grad():
            net(inputs)
        sync(device)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            output = net(inputs)

        def hand() -> object:
            inputs.copy_(x)
            graph.replay()
            return output.clone()

        return {
            "by hand": no_grad(hand),
            "peer": no_grad(lambda: theirs(x)),
            "kd": no_grad(lambda: ours(x)),
        }

    if device.type == "cuda":
        yield Row("CUDA graph of a keyed sequence, launch-bound", lambda: replays(64, 64))
        yield Row("CUDA graph of a keyed sequence, large", lambda: replays(2048, 2048))
        yield Row("CUDA graph of a module, launch-bound", lambda: alone(64, 64))
        yield Row("CUDA graph of a module, large", lambda: alone(2048, 2048))


def compiled(device: torch.device) -> Iterator[Row]:
    def sequence(mode: str | None) -> Mapping[str, Call]:
        torch.compiler.reset()
        net, x = network(64, 3, device), torch.rand(64, 64, device=device)
        library = importlib.import_module("tensordict.nn")
        options: dict[str, Any] = {"mode": mode} if device.type == "cuda" else {"backend": "eager"}
        Theirs, Ours = peer().TensorDict, kd_core.TensorDict  # noqa: N806  # classes

        def through(entries: dict[str, Tensor]) -> dict[str, Tensor]:
            entries = dict(entries)
            for n, layer in enumerate(net):
                entries[f"h{n + 1}"] = layer(entries[f"h{n}"])
            return entries

        hand = torch.compile(through, **options)
        theirs = torch.compile(keyed(library, net), **options)
        ours = torch.compile(keyed(kd_nn, net), **options)
        return {
            "by hand": no_grad(lambda: hand({"h0": x})),
            "peer": no_grad(lambda: theirs(Theirs({"h0": x}, [64]))),  # type: ignore[no-untyped-call]  # by torch
            "kd": no_grad(lambda: ours(Ours({"h0": x}, [64]))),  # type: ignore[no-untyped-call]  # by torch
        }

    yield Row("compiled sequence", lambda: sequence(None))
    yield Row("compiled sequence, reduce-overhead", lambda: sequence("reduce-overhead"))


def no_grad(call: Call) -> Call:
    def quiet() -> object:
        with torch.no_grad():
            return call()

    return quiet


# ------------------------------------------------------------------ programs

_FACTORIES = "zeros|ones|rand|randn|randint|randperm|arange|linspace|full|tensor"
_LAYERS = "Linear|GRUCell|GRU|Embedding|TransformerEncoderLayer"


def placed_source(source: str) -> str:
    """Return the text of a program whose tensors and layers are made on the device.

    Data that workers load are made without it, and each batch is moved there.
    """
    if "DataLoader" in source:
        source = source.replace(" in loader:", " in there(loader):")
    else:
        source = re.sub(rf"\btorch\.({_FACTORIES})\(", r"torch_there.\1(", source)
    source = source.replace("nn.Transformer.", "nn_there.Transformer.")
    return re.sub(rf"\bnn\.({_LAYERS})\(", r"nn_there.\1(", source)


def load(name: str, source: str, path: str, device: torch.device) -> ModuleType:
    """Return a module of the text of a program, on the device."""
    module = ModuleType(name)
    module.__file__ = path  # that the text of another program is found by
    factories = {
        each: partial(getattr(torch, each), device=device) for each in _FACTORIES.split("|")
    }
    layers: dict[str, object] = {
        each: partial(getattr(nn, each), device=device) for each in _LAYERS.split("|")
    }
    mask = partial(nn.Transformer.generate_square_subsequent_mask, device=device)
    layers["Transformer"] = SimpleNamespace(generate_square_subsequent_mask=mask)

    def there(batches: Iterable[Any]) -> Iterator[Any]:  # containers, or dicts of tensors
        for batch in batches:
            if isinstance(batch, dict):
                yield {key: leaf.to(device) for key, leaf in batch.items()}
            else:
                yield batch.to(device)

    vars(module).update(
        torch_there=SimpleNamespace(**factories), nn_there=SimpleNamespace(**layers), there=there
    )
    exec(compile(placed_source(source), path, "exec"), vars(module))
    return module


def programs(device: torch.device, name: str) -> dict[str, Callable[[int], Any]]:
    """Return `train` of each contender, on the device."""
    found: dict[str, Callable[[int], Any]] = {}
    shared = ("cart_poles", "pendulums", "meeting")
    for part in (
        *(f"examples.learning.{each}" for each in (*shared, name)),
        f"benchmarks.programs.{name}",
    ):
        path = Path(importlib.import_module(part).__file__ or "")
        text = path.read_text(encoding="utf-8")
        sys.modules[part] = load(part, text, str(path), device)
    found["by hand"] = sys.modules[f"benchmarks.programs.{name}"].train
    found["peer"] = load(f"peer_{name}", peer_source(name), f"peer_{name}.py", device).train
    found["kd"] = sys.modules[f"examples.learning.{name}"].train
    return found


def measure_program(name: str, device: torch.device, rounds: int) -> dict[str, Any]:
    trains = programs(device, name)
    order = list(trains)
    walls: dict[str, float] = {}
    cpus: dict[str, float] = {}
    outcomes = {}
    for number in range(rounds + 1):
        for contender in order:
            sync(device)
            start = time.perf_counter()
            result = run(trains[contender], PROGRAMS[name])
            sync(device)
            wall = time.perf_counter() - start
            outcomes[contender] = result
            if number:  # the first warms up
                walls[contender] = min(wall, walls.get(contender, wall))
                cpus[contender] = min(result.seconds, cpus.get(contender, result.seconds))
        order.append(order.pop(0))
    same = {c: is_equal(on_cpu(outcomes[c]), on_cpu(outcomes["by hand"])) for c in order}
    return {"wall": walls, "cpu": cpus, "equal": same}


def on_cpu(result: Any) -> Any:  # a `Run`
    return result._replace(parameters=[p.cpu() for p in result.parameters])


# ------------------------------------------------------------------ measuring


def measure(row: Row, device: torch.device) -> dict[str, Any]:
    """Return the least time of one call of each contender, in microseconds."""
    calls = row.build()
    walls: dict[str, float] = {}
    cpus: dict[str, float] = {}
    counts = {}
    failed = {}
    for name, call in calls.items():
        try:
            for _ in range(5):
                call()
            sync(device)
            start = time.perf_counter()
            for _ in range(3):
                call()
            sync(device)
            took = (time.perf_counter() - start) / 3
            counts[name] = max(3, min(2000, int(ROUND_SECONDS / max(took, 1e-6))))
        except Exception as error:  # a contender may lack it
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    order = list(counts)
    for _ in range(ROUNDS):
        for name in order:
            call, count = calls[name], counts[name]
            sync(device)
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                call()
            busy = time.process_time() - cpu
            sync(device)
            wall = time.perf_counter() - start
            walls[name] = min(walls.get(name, wall), wall / count)
            cpus[name] = min(cpus.get(name, busy), busy / count)
        order.append(order.pop(0))
    scale = 1e6
    found: dict[str, Any] = {
        "wall": {name: walls[name] * scale for name in NAMES if name in walls},
        "cpu": {name: cpus[name] * scale for name in NAMES if name in cpus},
    }
    return found | ({"failed": failed} if failed else {})


def ratios(took: Mapping[str, float]) -> dict[str, float]:
    found = {}
    with suppress(KeyError):
        found["kd/hand"] = took["kd"] / took["by hand"]
    with suppress(KeyError):
        found["kd/peer"] = took["kd"] / took["peer"]
    return found


def line(name: str, found: Mapping[str, Any], unit: str) -> str:
    wall = found.get("wall", {})
    scale = 1 if unit == "us" else 1000
    cells = "".join(
        f"{wall[each] * scale:11.1f}" if each in wall else f"{'-':>11}" for each in NAMES
    )
    shares = ratios(wall)
    marks = "".join(
        f"{shares[each]:8.3f}{' ' if shares[each] <= goal else '!'}"
        if each in shares
        else f"{'-':>9}"
        for each, goal in GOALS.items()
    )
    busy = ratios(found.get("cpu", {}))
    more = "".join(f"{busy[each]:9.3f}" if each in busy else f"{'-':>9}" for each in GOALS)
    note = f"  {found['failed']}" if "failed" in found else ""
    if not all(found.get("equal", {}).values()):
        note += f"  other numbers: {found['equal']}"
    return f"{name:46}{cells} {unit}{marks}{more}{note}"


def main() -> None:
    """Measure, print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", type=torch.device)
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device: torch.device = options.device
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no GPU; `--device cpu` tries the logic out")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    end = time.monotonic() + options.seconds
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    results: dict[str, Any] = {}
    missing: list[str] = []
    print(f"{card}, torch {torch.__version__}, tensordict {peer().__version__}; ! misses its goal")
    print(
        f"{'':46}{'by hand':>11}{'peer':>11}{'kd':>11}   {'kd/hand':>9}{'kd/peer':>9}"
        "  the same of the processor"
    )

    def note(name: str, unit: str, measured: Callable[[], dict[str, Any]]) -> None:
        if options.only not in name:
            return
        if time.monotonic() > end:
            missing.append(name)
            return
        try:
            found = measured()
        except Exception as error:  # the next rows are worth having
            found = {"failed": {"all": f"{type(error).__name__}: {str(error)[:300]}"}}
        results[name] = {**found, "unit": unit, "ratios": ratios(found.get("wall", {}))}
        print(line(name, found, unit), flush=True)
        if options.json is not None:
            data = {"card": card, "torch": torch.__version__, "rows": results, "missing": missing}
            options.json.write_text(json.dumps(data, indent=1), encoding="utf-8")

    for family in (moves, arithmetic, modules, graphs):
        for row in family(device):
            note(row.name, "us", partial(measure, row, device))
    for name in PROGRAMS:
        note(f"program {name}", "ms", partial(measure_program, name, device, PROGRAM_ROUNDS))
    for row in compiled(device):
        note(row.name, "us", partial(measure, row, device))
    print("not measured, for lack of time:", ", ".join(missing) or "nothing")


if __name__ == "__main__":
    main()
