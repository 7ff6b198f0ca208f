"""Compile and run the C++ program of the page "From training to the robot".

The policy is trained and exported by the code of the page itself. What the program prints must be
what the runner in Python gives.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import kd_export

PAGE = Path(__file__).parent.parent / "docs" / "tutorials" / "robot.md"
STEPS = 3


def blocks(language: str) -> list[str]:
    """Return the code of one language, in the order of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)


def force_in_python() -> float:
    """Run the package as the C++ program does."""
    session = kd_export.open("policy.aoti.pt2", trusted=True)
    position = torch.full((2, 1), 0.5)
    for _ in range(STEPS):
        result = session.step({"obs.position": position})
    return float(result["action.force"][0, 0])


def main() -> None:
    """Run the page's Python, compile its C++ by its own commands, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        names: dict[str, object] = {}
        train = next(i for i, block in enumerate(blocks("python")) if "kd_export.export(" in block)
        exec("".join(blocks("python")[: train + 1]), names)
        program = names["program"]
        assert isinstance(program, kd_export.KeyedProgram)
        program.save("policy.aoti.pt2")
        Path("robot.cpp").write_text(blocks("cpp")[0], "utf-8")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-ec", blocks("sh")[-1]],
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found, expected = float(done.stdout), force_in_python()
    print(f"C++ {found:.6f}, Python {expected:.6f}")
    if abs(found - expected) > 1e-5:
        sys.exit("the program of the page gives other numbers than the runner")


if __name__ == "__main__":
    main()
