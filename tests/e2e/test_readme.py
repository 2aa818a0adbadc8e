"""README.md's Python runs as it stands."""

import re
from pathlib import Path

import jax

README = Path(__file__).parents[2] / "README.md"


def test_the_python_of_the_readme_runs():
    blocks = re.findall(
        r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks, "README.md shows no Python"
    namespace: dict = {"__name__": "readme"}
    # A reader's JAX has its defaults, and optax relies on them.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, str(README), "exec"), namespace)
