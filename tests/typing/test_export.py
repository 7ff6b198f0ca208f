"""What a type checker must infer of kd_export; mypy reads this file, nothing runs it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, assert_type

    from torch import Tensor, nn

    import kd_export
    from kd_core import TensorDict
    from kd_export import KeyedProgram, Report, Schema, Session

    def exporting(module: nn.Module, x: Tensor, td: TensorDict) -> None:
        assert_type(kd_export.export(module, {"x": x}), KeyedProgram)
        assert_type(kd_export.export(module, {("in", "x"): x}), KeyedProgram)
        assert_type(kd_export.export(module, {"in": {"x": x}}), KeyedProgram)
        assert_type(kd_export.export(module, td, dynamic=None), KeyedProgram)
        kd_export.export(module, td, dynamic={"batch": (1, 8)})
        kd_export.export(module, td, dynamic={"x": {0: "rows"}})
        kd_export.export(module, td, dynamic=3)  # type: ignore[arg-type]  # wrong on purpose
        assert_type(kd_export.save(module, "model.pt2", td), Report)

    def running(session: Session, x: Tensor, td: TensorDict) -> None:
        assert_type(session.run({"x": x}), dict[str, Any])
        assert_type(session.run({("in", "x"): x}), dict[tuple[str, ...], Any])
        assert_type(session.run({"x": x})["out"]["action"], Any)
        assert_type(session.step({"x": x})["y"] + 1, Any)
        assert_type(session.run(td), TensorDict)
        assert_type(session.schema, Schema)
