"""Forged and damaged archives: one change, or a few, to a good one."""

import io
import json
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable, Sequence

from tests.fuzz.forged_worker import CANARY


class Payload:
    """Unpickles to a call that leaves a trace."""

    def __reduce__(self) -> tuple[object, ...]:
        return eval, (f"__import__('os').mkdir('{CANARY}')",)


CODE = f"__import__('os').mkdir('{CANARY}')"
NUMBERS: list[object] = [
    0, 1, -1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**9, 10**30, 10**400, 1.5, 1e308, float("nan"),
    float("inf"), True, False,
]  # fmt: skip
TEXTS: list[object] = [
    "", "x", "y", "é", "\0", "\ud800", "__class__", "class", "a" * 100_000, CODE, f"x={CODE}",
    f"x):\n {CODE}\n#", f"{CANARY}.module", f"{CANARY}:Kind", "os.system", "torch.os.system",
    "_operator.call", "torch.ops.aten.from_file.default", "torch.ops.aten.save.default",
    "torch.ops.aten.__class__.mro", "torch.ops.aten.relu.default", "torch.ops.aten.neg.default",
    "torch.ops.load_library", "9**9**9**9", "Pow(Integer(9), Integer(999999999))", "batch",
    f"Max('{CODE}', 1)", "../weight_0", "/dev/zero", f"/tmp/{CANARY}", "opaque_obj_0", "float32",
    "float8_none", "evil.Kind", "u999999999", "cuda", "random", "inf",
    json.dumps([1, {"type": "builtins.dict", "context": json.dumps(
        [{"__enum__": True, "fqn": f"{CANARY}:Kind", "name": "A"}]), "children_spec": []}]),
]  # fmt: skip
MEMBERS = [
    "data/constants/opaque_obj_0", "data/constants/opaque_obj/tensor_0", "data/weights/model.pt",
    "data/constants/custom_obj_0", "data/weights/weight_0/x", "data/sample_inputs/model.pt",
    "models/other.json", "data/aotinductor/model/x.so", "extra/more", "../../x", "version",
    "data.pkl", f"{CANARY}.py", "data/constants/tensor_0", "archive_version", "byteorder",
    "data/aotinductor/model/../../../x.so", "data/aotinductor/other/x.so", "models/model.json",
]  # fmt: skip

Json = object


def places(item: Json) -> list[tuple[object, object]]:
    """List every place of a value in JSON: its container and its key."""
    pairs = (
        item.items()
        if isinstance(item, dict)
        else enumerate(item)
        if isinstance(item, list)
        else ()
    )
    found: list[tuple[object, object]] = []
    for key, value in pairs:
        found += [(item, key), *places(value)]
    return found


def forge_json(text: bytes, source: random.Random) -> bytes:
    data = json.loads(text)
    for _ in range(source.choice([1, 1, 1, 2, 3])):
        if not (all_places := places(data)):
            break
        container, key = source.choice(all_places)
        change(container, key, source)
    return json.dumps(data).encode()


def change(container: object, key: object, source: random.Random) -> None:
    assert isinstance(container, dict | list)
    old = container[key]  # type: ignore[call-overload]  # a key or a position
    kind = source.randrange(10)
    new: object
    if kind == 0:
        del container[key]  # type: ignore[arg-type]  # a key or a position
        return
    if kind == 1 and isinstance(container, dict):
        container[source.choice(TEXTS)] = container.pop(key)
        return
    if kind == 2:
        new = json.loads("[" * 400 + "]" * 400)
    elif kind == 3:
        new = source.choice([None, [], {}, [old], {"as_string": old}, {"evil": old}, [old] * 1000])
    elif isinstance(old, int | float) or (not isinstance(old, str) and kind < 6):
        new = source.choice(NUMBERS)
    elif isinstance(old, str) and kind < 6 and old:
        position = source.randrange(len(old))
        new = old[:position] + source.choice(["", "x", ".", "=", "0"]) + old[position + 1 :]
    else:
        new = source.choice(TEXTS)
    container[key] = new  # type: ignore[call-overload]  # a key or a position


def damage(data: bytes, source: random.Random) -> bytes:
    """Flip bits, cut, repeat or insert bytes."""
    kind, position = source.randrange(4), source.randrange(len(data))
    if kind == 0:
        changed = bytearray(data)
        for _ in range(source.choice([1, 1, 2, 10])):
            changed[source.randrange(len(data))] ^= 1 << source.randrange(8)
        return bytes(changed)
    if kind == 1:
        return data[:position]
    if kind == 2:
        return data[:position] + source.randbytes(source.randrange(1, 50)) + data[position:]
    return data[:position] + data[source.randrange(len(data)) :]


def forge_pt2(data: bytes, source: random.Random) -> bytes:
    kinds = (forge_member, attack, add_member, rename_member, repack, forge_member, attack)
    return forge_archive(data, source, kinds)


def forge_compiled(data: bytes, source: random.Random) -> bytes:
    return forge_archive(data, source, (forge_member, add_member, rename_member, repack))


def forge_archive(data: bytes, source: random.Random, kinds: Sequence[Callable[..., int]]) -> bytes:
    if source.random() < 0.2:
        return damage(data, source)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = [(name, archive.read(name)) for name in archive.namelist()]
    kind = source.choice(kinds)
    compression = kind(files, source)
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, content in files:
            archive.writestr(name.encode("utf-8", "replace").decode(), content)
    return buffer.getvalue()


Files = list[tuple[str, bytes]]


def forge_member(files: Files, source: random.Random) -> int:
    texts = [i for i, (name, _) in enumerate(files) if name.endswith(".json")]
    number = source.choice(texts)
    files[number] = files[number][0], forge_json(files[number][1], source)
    return zipfile.ZIP_STORED


def add_member(files: Files, source: random.Random) -> int:
    content = source.choice([pickle.dumps(Payload()), b"", b"x" * 1000, CODE.encode()])
    folder = source.choice(["good", "good", "other", ""])
    files.insert(source.randrange(len(files)), (f"{folder}/{source.choice(MEMBERS)}", content))
    return zipfile.ZIP_STORED


def rename_member(files: Files, source: random.Random) -> int:
    number = source.randrange(len(files))
    name = source.choice([f"good/{source.choice(MEMBERS)}", files[0][0], "x"])
    files[number] = name, files[number][1]
    return zipfile.ZIP_STORED


def repack(files: Files, source: random.Random) -> int:
    number = source.randrange(len(files))
    if source.random() < 0.5:
        files[number] = files[number][0], bytes(1 << 24)
        return zipfile.ZIP_DEFLATED
    files[number] = files[number][0], source.choice([b"", pickle.dumps(Payload()), bytes(100)])
    return zipfile.ZIP_STORED


MODEL = "good/models/model.json"
CONSTANTS = "good/data/constants/model_constants_config.json"
WEIGHTS = "good/data/weights/model_weights_config.json"
SAMPLES = "good/data/sample_inputs/model.pt"
PICKLE = pickle.dumps(Payload())
ENUM = json.dumps([{"__enum__": True, "fqn": f"{CANARY}:Kind", "name": "A"}])


def attack(files: Files, source: random.Random) -> int:
    """Make one of the forgeries that are known to run code in torch."""
    content = dict(files)
    forgery: Callable[..., None] = source.choice(ATTACKS)
    forgery(content, source)
    files[:] = list(content.items())
    return zipfile.ZIP_STORED


def replace_in_model(content: dict[str, bytes], old: str, new: str) -> None:
    content[MODEL] = content[MODEL].replace(old.encode(), new.encode())


def pickled_constant(content: dict[str, bytes], source: random.Random) -> None:
    name = source.choice(["opaque_obj_0", "opaque_obj/tensor_0", "custom_obj_0", "opaque_obj_0/x"])
    meta = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    content[CONSTANTS] = json.dumps({"config": {"c": meta}}).encode()
    content[f"good/data/constants/{name}"] = PICKLE


def pickled_weights(content: dict[str, bytes], source: random.Random) -> None:
    if source.random() < 0.5:
        content["good/data/weights/model.pt"] = PICKLE
        return
    content[WEIGHTS] = content[WEIGHTS].replace(b'"use_pickle": false', b'"use_pickle": true')
    content["good/data/weights/weight_0"] = PICKLE


def pickled_samples(content: dict[str, bytes], source: random.Random) -> None:
    content[SAMPLES] = PICKLE


def code_in_names(content: dict[str, bytes], source: random.Random) -> None:
    old = source.choice(["x", "state_h", "gru_cell", "p_module_net_cell_bias_ih"])
    replace_in_model(content, f'"name": "{old}"', f'"name": "{old}={CODE}"')
    replace_in_model(content, f'"{old}": {{', f'"{old}={CODE}": {{')


def code_in_sizes(content: dict[str, bytes], source: random.Random) -> None:
    text = source.choice([CODE, f"Max(Integer(1), {CODE})", "9**9**9**9", f"Integer('{CODE}')"])
    model = json.loads(content[MODEL])
    for container, key in places(model):
        if key == "expr_str" and isinstance(container, dict):
            container[key] = text
    content[MODEL] = json.dumps(model).encode()


def enum_in_tree(content: dict[str, bytes], source: random.Random) -> None:
    tree = [1, {"type": "builtins.dict", "context": ENUM, "children_spec": []}]
    model = json.loads(content[MODEL])
    field = source.choice(["in_spec", "out_spec"])
    for container, key in places(model):
        if key == field and isinstance(container, dict):
            container[key] = json.dumps(tree)
    content[MODEL] = json.dumps(model).encode()


def harmful_operator(content: dict[str, bytes], source: random.Random) -> None:
    """Let the last operator write or read a file, or call what its arguments name."""
    model = json.loads(content[MODEL])
    node = model["graph_module"]["graph"]["nodes"][-1]
    node["target"] = source.choice(["torch.ops.aten.from_file.default", "torch.os.mkdir",
                                    "torch.ops.aten.save.default", "torch.os.system"])  # fmt: skip
    names = ("filename", "shared", "size")
    values = ({"as_string": CANARY}, {"as_bool": True}, {"as_int": 20})
    node["inputs"] = [
        {"name": name, "arg": value, "kind": 1} for name, value in zip(names, values, strict=True)
    ]
    if node["target"].startswith("torch.os"):
        node["inputs"] = node["inputs"][:1]
    content[MODEL] = json.dumps(model).encode()


def endless_count(content: dict[str, bytes], source: random.Random) -> None:
    model = json.loads(content[MODEL])
    model["range_constraints"]["u99999999999"] = {"min_val": 0, "max_val": None}
    content[MODEL] = json.dumps(model).encode()


ATTACKS = (
    pickled_constant, pickled_weights, pickled_samples, code_in_names, code_in_sizes, enum_in_tree,
    harmful_operator, endless_count,
)  # fmt: skip
