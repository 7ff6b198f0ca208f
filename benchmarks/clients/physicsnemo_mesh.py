"""PhysicsNeMo's meshes: typed containers with caches, nested data, casts, slices and files."""

import copy
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch
from measured import Numbers, content, main, results

# Layers of another library, which its package imports and meshes do not use.
for name, members in {
    "timm": (),
    "timm.layers": ("RmsNorm", "to_2tuple"),
    "timm.layers.attention": ("Attention",),
    "timm.models": (),
    "timm.models.swin_transformer": ("SwinTransformerStage",),
}.items():
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(dict.fromkeys(members, torch.nn.Module))

from physicsnemo.mesh import Mesh  # noqa: E402
from physicsnemo.mesh.calculus.derivatives import compute_point_derivatives  # noqa: E402
from physicsnemo.mesh.primitives.basic import two_tetrahedra, two_triangles_2d  # noqa: E402
from physicsnemo.mesh.primitives.curves import helix_3d  # noqa: E402
from physicsnemo.mesh.primitives.surfaces import (  # noqa: E402
    cylinder_open,
    sphere_icosahedral,
    torus,
)
from physicsnemo.mesh.repair import repair_mesh  # noqa: E402
from tensordict import TensorDict  # noqa: E402


def sphere() -> Mesh:
    """Return a sphere with data on points, cells and the whole."""
    mesh = sphere_icosahedral.load(radius=2.0, subdivisions=1)
    mesh.point_data["pressure"] = torch.arange(mesh.n_points, dtype=torch.float32)
    mesh.point_data["flow", "velocity"] = torch.randn(mesh.n_points, 3)
    mesh.cell_data["heat"] = torch.randn(mesh.n_cells)
    mesh.global_data["reynolds"] = torch.tensor(100.0)
    return mesh


def cached() -> Mesh:
    """Return a sphere whose normals, areas and centres are cached."""
    mesh = sphere()
    assert mesh.cell_normals.shape[0] == mesh.cell_areas.shape[0] == mesh.n_cells
    assert mesh.point_normals.shape == mesh.cell_centroids[: mesh.n_points].shape
    return mesh


def on_disk(mesh: Mesh) -> object:
    """Return a mesh that was written as memory maps."""
    with tempfile.TemporaryDirectory() as folder:
        mesh.memmap(folder)
        return content(Mesh.load_memmap(folder))


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each case by name."""
    for name, load in {
        "sphere": sphere,
        "torus": torus.load,
        "open": cylinder_open.load,
        "tetrahedra": two_tetrahedra.load,
        "triangles": two_triangles_2d.load,
        "helix": helix_3d.load,
    }.items():
        yield name, load
        for each in (
            *("cell_centroids", "cell_areas", "cell_normals", "point_normals", "quality_metrics"),
            *("gaussian_curvature_vertices", "mean_curvature_vertices", "statistics"),
        ):
            yield f"{name} {each}", partial(lambda f, n: getattr(f(), n), load, each)
        for each in (
            *("get_boundary_mesh", "get_facet_mesh", "to_edge_graph", "to_dual_graph", "clean"),
            *("to_point_cloud", "get_point_to_cells_adjacency", "cell_data_to_point_data"),
            *("get_point_to_points_adjacency", "get_cell_to_cells_adjacency", "pad_to_next_power"),
            *("point_data_to_cell_data", "strip_caches", "sample_random_points_on_cells"),
        ):
            yield f"{name} {each}", partial(lambda f, n: getattr(f(), n)(), load, each)
    for way in ("linear", "butterfly", "loop"):
        yield f"subdivide {way}", partial(lambda w: sphere().subdivide(1, w), way)
    for key in ("pressure", ("flow", "velocity")):
        yield f"derivatives {key}", partial(lambda k: compute_point_derivatives(sphere(), k), key)
    yield "moved", lambda: cached().translate([1.0, 2.0, 3.0])
    yield "turned", lambda: cached().rotate(0.5, axis=[0.0, 0.0, 1.0])
    yield "scaled", lambda: cached().scale(2.0)
    yield "mapped", lambda: cached().transform(torch.randn(3, 3))
    yield "points", lambda: cached().slice_points(torch.arange(20))
    yield "cells", lambda: cached().slice_cells(torch.arange(10))
    yield "mask", lambda: cached().slice_cells(torch.arange(cached().n_cells) % 2 == 0)
    yield "merged", lambda: Mesh.merge([cached(), sphere()])
    yield "padded", lambda: sphere().pad(100, 200)
    yield "sampled", lambda: sphere().sample_data_at_points(torch.randn(5, 3))
    yield "repaired", lambda: repair_mesh(cylinder_open.load(), merge_points=True)
    yield "double", lambda: cached().to(torch.float64)
    yield "device", lambda: cached().to("cpu")
    yield "cloned", lambda: [cached().clone(), copy.copy(cached()), copy.deepcopy(cached())]
    yield "pickled", lambda: pickle.loads(pickle.dumps(cached()))
    yield "mapped to files", lambda: on_disk(cached())
    yield "dict", lambda: [cached().to_dict(), cached().to_tensordict()]
    yield "from dict", lambda: Mesh.from_tensordict(sphere().to_tensordict())
    yield "printed", lambda: [repr(cached()), str(Mesh[2, 3]), isinstance(sphere(), Mesh[2, 3])]
    yield "applied", lambda: sphere().apply(lambda x: x.float() * 2)
    yield "keys", lambda: [list(cached().keys(True, True)), list(cached().keys())]
    yield (
        "data",
        lambda: Mesh(
            torch.rand(4, 2),
            torch.tensor([[0, 1, 2], [1, 2, 3]]),
            point_data={"a": torch.ones(4)},
            cell_data=TensorDict(b=torch.zeros(2), batch_size=[2]),
            global_data={"c": 1.0},
        ),
    )
    yield "wrong data", lambda: Mesh(torch.rand(4, 2), point_data={"a": torch.ones(3)})
    yield "trained", trained


def trained() -> object:
    """Pull the points of a mesh to a target by gradient descent."""
    mesh = sphere()
    points = mesh.points.clone().requires_grad_()
    optimiser = torch.optim.Adam([points], lr=0.01)
    for _ in range(5):
        moved = Mesh(points, mesh.cells, point_data=mesh.point_data)
        loss = moved.cell_areas.sum() + moved.cell_normals.pow(2).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [points, loss]


def train() -> Numbers:
    """Return what each case gives."""
    return results(dict(cases()))


if __name__ == "__main__":
    main(train)
